"""Packing streams: its peak does not grow with the checkpoint, and a pack that goes on reads only what is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from family_checkpoints import make_checkpoint

from moebench import hashes
from moebench.checkpoint.files import Checkpoint
from moebench.checkpoint.open import open_source
from moebench.store.engines import StoreError
from moebench.store.layout import QuantSpec
from moebench.store.plain import PlainLayout
from moebench.store.writer import write_pack

SIZES = {"hidden_size": 512, "intermediate_size": 256, "num_local_experts": 8, "vocab_size": 64}
LAYER = 8 * 3 * 512 * 256 * 2  # bytes of one layer's experts
CHILD = """
import sys
from moebench.checkpoint.open import open_source
from moebench.store.layout import QuantSpec
from moebench.store.plain import PlainLayout
from moebench.store.writer import write_pack
for folder in sys.argv[1:]:
    write_pack(folder + ".pack", open_source(folder), QuantSpec("int8"), PlainLayout())
    print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="peaks are read from Linux's /proc")
def test_the_peak_does_not_grow_with_the_number_of_layers(tmp_path):
    folders = [
        make_checkpoint("mixtral", tmp_path / f"{n}", tokenizer=False, shards=4, num_hidden_layers=n, **SIZES)
        for n in (2, 16)
    ]
    assert sum(f.stat().st_size for f in folders[1].iterdir()) > 15 * LAYER  # held whole it would show
    done = subprocess.run([sys.executable, "-c", CHILD, *map(str, folders)], capture_output=True, text=True, check=True)
    small, large = (int(line) * 1024 for line in done.stdout.split())
    assert large - small < 3 * LAYER


class Interrupted(Exception):
    pass


def test_a_pack_that_goes_on_reads_no_expert_again_and_notices_other_weights(tmp_path, monkeypatch):
    folder, out = make_checkpoint("mixtral", tmp_path / "m", tokenizer=False), tmp_path / "pack"

    def stop(done, total):
        if done == 12:
            raise Interrupted

    with pytest.raises(Interrupted):
        write_pack(out, open_source(folder), QuantSpec("int4"), PlainLayout(), progress=stop)
    read, names = Checkpoint.read, []
    monkeypatch.setattr(Checkpoint, "read", lambda self, name, *rows: names.append(name) or read(self, name, *rows))
    pack = write_pack(out, open_source(folder), QuantSpec("int4"), PlainLayout())
    pack.verify()
    again = {name for name in names if ".layers.0." in name and ".experts." in name}
    assert again == {f"model.layers.0.block_sparse_moe.experts.0.w{i}.weight" for i in (1, 2, 3)}  # the pattern of all
    assert "model.norm.weight" not in names

    out = tmp_path / "other"
    with pytest.raises(Interrupted):
        write_pack(out, open_source(folder), QuantSpec("int4"), PlainLayout(), progress=stop)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(StoreError, match=r"interrupted pack of another request \(differs in model\)"):
        write_pack(out, open_source(folder), QuantSpec("int4"), PlainLayout())


def test_a_large_files_hash_is_kept_while_nothing_says_it_changed(tmp_path, monkeypatch):
    monkeypatch.setenv("MOEBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(hashes, "LARGE", 10)
    reads = []
    real = hashes.file_hash
    monkeypatch.setattr(hashes, "file_hash", lambda path: reads.append(path) or real(path))
    file = tmp_path / "weights"
    file.write_bytes(b"x" * 64)
    first = hashes.kept_file_hash(file)
    assert hashes.kept_file_hash(file) == first
    assert len(reads) == 2  # changed a moment ago: not kept
    os.utime(file, ns=(0, 10**15))
    assert [hashes.kept_file_hash(file) for _ in range(3)] == [first] * 3
    assert len(reads) == 3
    file.write_bytes(b"y" * 64)
    os.utime(file, ns=(0, 10**15 + 1))
    assert hashes.kept_file_hash(file) == real(file) != first
    (kept, *_) = (tmp_path / "home" / "cache" / "hashes").iterdir()
    kept.write_text(json.dumps({"file": ["another"], "hash": "0"}))
    for path in (tmp_path / "home" / "cache" / "hashes").iterdir():
        path.write_text("{")
    assert hashes.kept_file_hash(file) == real(file)
