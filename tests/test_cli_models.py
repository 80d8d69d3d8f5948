"""Recording and packing from the command line: a trace is the model's own routing, an order moves bytes only."""

from __future__ import annotations

import json

import numpy as np
import pytest

from moebench.cli import main
from moebench.harness.plan import embedded_folder
from moebench.store.pack import Pack
from moebench.trace.format import load


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """One short recording of the embedded model, its home folder and the words that made it."""
    folder = tmp_path_factory.mktemp("recorded")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOEBENCH_PLUGINS", "")
        patch.setenv("MOEBENCH_HOME", str(folder / "home"))
        words = ["requests=2", "new_tokens=4"]
        assert main(["trace", "record", f"out={folder / 'a.safetensors'}", *words]) == 0
        assert main(["trace", "record", f"out={folder / 'b.safetensors'}", *words]) == 0
        yield folder


def last_document(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_recording_repeats_and_keeps_requests_apart(recorded):
    one, two = load(recorded / "a.safetensors"), load(recorded / "b.safetensors")
    assert one.hash == two.hash
    assert len(one.sequence_starts) == 2
    assert one.weights is not None
    assert (one.experts >= 0).all()
    decoded = np.bincount(one.sequence[one.phase == 1])
    assert (decoded <= 3).all()  # the first of four tokens comes out of the prompt
    assert decoded.sum() > 0


def test_an_ordered_pack_holds_the_same_weights_with_used_experts_first(recorded, capsys):
    trace = load(recorded / "a.safetensors")
    hashes = []
    for name, words in (("plain", []), ("ordered", ["layout=ordered", f"trace={recorded / 'a.safetensors'}"])):
        assert main(["pack", f"model={embedded_folder()}", f"out={recorded / name}", *words]) == 0
        hashes.append(last_document(capsys)["logical_hash"])
    assert hashes[0] == hashes[1]
    plain, ordered = (Pack.open(recorded / name) for name in ("plain", "ordered"))
    assert plain.file_path.read_bytes() != ordered.file_path.read_bytes()
    used = np.bincount(trace.experts[:, 0].ravel(), minlength=trace.expert_count)
    first = np.zeros(ordered.slot_bytes, np.uint8)
    with ordered.file_path.open("rb") as file:
        start = file.read(ordered.expert_bytes)
    ordered.read(int(used.argmax()), first)
    assert start == first[: ordered.expert_bytes].tobytes()


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["pack", "out=x", "layout=ordered"], "belong together"),
        (["pack", "out=x", "trace=a"], "belong together"),
        (["trace", "record", "out=x", "model=nowhere"], "config.json"),
        (["trace", "record", "out=x", "requests=0"], "at least 1"),
        (["trace", "record", "out=x", "prompts=nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_wrong_use_is_one_line(words, hint, capsys):
    if words[0] == "pack":
        words = [*words, f"model={embedded_folder()}"]
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert hint in line
