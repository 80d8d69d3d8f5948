"""Files that somebody else wrote (geometries, machines, traces, results): understood, or refused in one line; never
another exception, and never a read elsewhere.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from untrusted_fixtures import VALUES, damaged, damaged_bytes, fuzz, one_line

from moebench import hardware, model_card, result
from moebench.plugins import load_plugins
from moebench.trace import format as traces
from moebench.trace.synthetic import SyntheticSpec, synthesize

REGISTRY = load_plugins()
GEOMETRY = yaml.safe_load(REGISTRY.model_path("kimi-k2.7-code").read_text())
MACHINE = yaml.safe_load(REGISTRY.hardware_path("rtx5090_32gb").read_text())
ROW = json.loads(next(Path(__file__).parents[1].glob("results/baseline/replay/m4pro/lru__*/*.json")).read_text())
KEYS = st.sampled_from(["experts", "top_k", "model", "source"])


@fuzz(60)
@given(damaged(GEOMETRY))
def test_geometries(tmp_path, data):
    path = tmp_path / "model.yaml"
    path.write_text(yaml.safe_dump(data, allow_unicode=True))

    def read() -> None:
        from moebench.commands.model_figures import describe

        assert all(isinstance(line, str) for line in describe(model_card.load(path)))

    one_line(read)


@fuzz(60)
@given(damaged(MACHINE))
def test_machines(tmp_path, data):
    path = tmp_path / "machine.yaml"
    path.write_text(yaml.safe_dump(data, allow_unicode=True))

    def read() -> None:
        profile = hardware.load(path)
        assert profile.digest
        assert 0 < profile.read_gb_s(65536, 4) < math.inf

    one_line(read)


@fuzz(60)
@given(st.one_of(st.binary(max_size=60), st.text(max_size=60).map(str.encode)))
@pytest.mark.parametrize("read", [model_card.load, hardware.load, traces.load, result.load])
def test_any_bytes(tmp_path, read, content):
    path = tmp_path / "any.yaml"
    path.write_bytes(content)
    assert not one_line(lambda: read(path))


@pytest.mark.parametrize("read", [model_card.load, hardware.load, traces.load, result.load])
@pytest.mark.parametrize(
    "content",
    [
        "[" * 20000,
        "a: " * 3000,
        "!!python/object/apply:os.system ['touch stolen']",
        "&a [*a]",
        "{" * 5000,
        "- 2001-99-99",
        "? [a]\n: 1",
        "x: !!int abc",
        "a: &a [x,x]\nb: &b [*a,*a]\nc: [*b,*b]",
        "\x00",
        "a: 1\n" * 500_000,
    ],
)
def test_known_tricks(tmp_path, monkeypatch, read, content):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "trick.yaml"
    path.write_text(content)
    assert not one_line(lambda: read(path))
    assert [entry.name for entry in tmp_path.iterdir()] == ["trick.yaml"]


@pytest.mark.parametrize("read", [model_card.load, hardware.load, traces.load, result.load])
def test_what_is_no_file(tmp_path, read):
    assert not one_line(lambda: read(tmp_path))
    assert not one_line(lambda: read(tmp_path / "nothing"))


@fuzz(60)
@given(damaged(ROW), st.booleans())
def test_results(tmp_path, data, claimed):
    path = tmp_path / "row.json"
    if isinstance(data, dict) and claimed:  # whoever writes a file can write its id too
        try:
            data["id"] = result._id({key: value for key, value in data.items() if key != "id"})
        except (TypeError, ValueError, result.ResultError):
            return
    try:
        path.write_text(json.dumps(data, default=str))
    except TypeError:
        return

    def read() -> None:
        row = result.load(path)
        assert result.from_json(result.to_json(row)).id == row.id
        assert ".." not in row.folder.parts

    one_line(read)


@pytest.fixture(scope="module")
def recording(tmp_path_factory) -> bytes:
    spec = SyntheticSpec(
        layers=2, experts=16, top_k=2, sequences=2, prefill=4, decode=4, topics=2, topics_per_sequence=1
    )
    return synthesize(spec).save(tmp_path_factory.mktemp("trace") / "a.safetensors").read_bytes()


@fuzz(60)
@given(st.data())
def test_traces(tmp_path, recording, data):
    content, path = data.draw(damaged_bytes(recording)), tmp_path / "a.safetensors"
    path.write_bytes(content)

    def read() -> None:
        assert (traces.load(path).experts >= -1).all()

    if one_line(read):
        assert content == recording or traces.load(path).tokens >= 0


@fuzz(60)
@given(st.dictionaries(st.sampled_from(["schema", "hash", "metadata"]), VALUES), st.booleans(), KEYS)
def test_headers_of_traces(tmp_path, header, whole, odd):
    from safetensors.numpy import save

    more = header.get("metadata")
    known = {"model": "m", "experts": 4, "top_k": 2, "source": "s", **(more if isinstance(more, dict) else {})}
    known[odd] = header.get("hash")
    header = {**header, "metadata": known, "schema": 1, "hash": "x"} if whole else header
    text = json.dumps(header, default=str, skipkeys=True)
    rows = np.arange(3, dtype=np.int32)
    experts = np.tile(np.arange(2, dtype=np.int16), (3, 2, 1))
    arrays = {"experts": experts, "phase": np.zeros(3, np.int8), "sequence": np.zeros(3, np.int32), "position": rows}
    path = tmp_path / "b.safetensors"
    path.write_bytes(save(arrays, metadata={traces.HEADER: text}))
    assert not one_line(lambda: traces.load(path))
