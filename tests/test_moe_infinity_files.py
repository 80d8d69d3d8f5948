"""MoE-Infinity's collections as files, what is refused, what a replay makes up, and a model that computes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from engine_fixtures import Watch, make_trace
from moe_infinity_fixtures import context, options
from test_live_identity import Lab

import moebench
from moebench.artefact import HEADER, read_header
from moebench.cli import main
from moebench.errors import UsageError
from moebench.geometry import Geometry
from moebench.plugins import load_plugins
from moebench.systems.moe_infinity import MoeInfinity, artefact
from moebench.systems.moe_infinity.artefact import Prepared, check, find, load, save
from moebench.systems.moe_infinity.counting import count
from moebench.systems.moe_infinity.equipment import CAPACITY, MADE_UP, equip
from moebench.systems.moe_infinity.prepare import SCRIPTS, PrepareOptions
from moebench.systemspec import Target
from moebench.trace.synthetic import SyntheticSpec, synthesize

SHAPE = Geometry("small", layers=4, experts=12, top_k=3, hidden=64, intermediate=64, other_parameters=1000)
TRACE = make_trace(60, 3)
TARGET = Target("small", SHAPE, trace=make_trace(60, 3, seed=5))
FOLDER = Path(str(resources.files("moebench.systems.moe_infinity"))) / "artefacts" / "tinymoe"


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("MOEBENCH_HOME", str(tmp_path / "home"))


def prepared(trace=TRACE, **changes):
    return replace(Prepared("small", trace.top_k, trace.hash, count(trace)), **changes)


def test_a_collection_comes_back_as_it_was_written(tmp_path):
    made = prepared(weights_hash="abc", provenance={"seed": 3})
    found = load(save(made, tmp_path / "c"))
    assert np.array_equal(found.counts, made.counts)
    assert (found.model, found.top_k, found.trace_hash, found.weights_hash) == ("small", 3, TRACE.hash, "abc")
    assert found.provenance == {"seed": 3}
    assert [file.name for file in (tmp_path / "c").iterdir()] == [artefact.FILE]


@pytest.mark.parametrize("spoil", ["missing", "short", "other", "schema"])
def test_a_damaged_file_is_one_line_that_names_it(tmp_path, spoil):
    from safetensors.numpy import save_file

    file = save(prepared(), tmp_path / "c") / artefact.FILE
    if spoil == "missing":
        file.unlink()
    elif spoil == "short":
        file.write_bytes(file.read_bytes()[:-100])
    else:
        header = {HEADER: json.dumps({"schema": 9})} if spoil == "schema" else None
        save_file({"counts": np.zeros((1, 4, 12), np.uint16)}, file, metadata=header)
    with pytest.raises(UsageError, match="prepare") as caught:
        load(tmp_path / "c")
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("made", "target", "word"),
    [
        (prepared(), replace(TARGET, geometry=replace(SHAPE, experts=16)), "4 layers of 12 experts, top 3"),
        (prepared(top_k=2), TARGET, "top 2"),
        (prepared(TARGET.trace), TARGET, "the trace that is replayed"),
        (prepared(model="other"), TARGET, "is of other, not of small"),
        (prepared(weights_hash="a"), replace(TARGET, trace=None, weights_hash="b"), "other weights; make one"),
    ],
)
def test_a_collection_of_something_else_is_refused(made, target, word):
    with pytest.raises(UsageError, match=word):
        check(made, target)
    check(prepared(), TARGET)


def test_a_recorded_trace_takes_a_collection_of_its_model_or_says_how_to_make_one(tmp_path):
    with pytest.raises(UsageError, match="moebench prepare system=moe_infinity model=small trace=FILE"):
        equip(options(), TARGET)
    save(prepared(TARGET.trace), tmp_path / "home" / "artefacts" / "moe_infinity" / "a")
    assert find(TARGET) is None  # counted on the very trace
    folder = save(prepared(), tmp_path / "home" / "artefacts" / "moe_infinity" / "b")
    assert find(TARGET) == folder
    brought = equip(options(), TARGET)
    assert np.array_equal(brought.content, count(TRACE))
    assert brought.files == {"collection": read_header(folder / artefact.FILE)["digest"]}
    assert any("matrices of another trace" in line for line in brought.assumptions)
    assert brought.held_bytes == {"predictor": 3 * SHAPE.keys * 4}
    assert equip(options(capacity=2), TARGET).held_bytes == {"predictor": 2 * SHAPE.keys * 4}
    empty = equip(options(collection="empty"), TARGET)
    assert len(empty.content) == 0
    assert empty.held_bytes == {"predictor": CAPACITY * SHAPE.keys * 4}
    with pytest.raises(UsageError, match="must be below the 3 entries"):
        equip(options(update="least_matched", persistent=3), TARGET)


@pytest.mark.parametrize("config", [options(prefetch=False), options(match="off")])
def test_without_matching_nothing_is_brought(config):
    brought = equip(config, TARGET)
    assert not brought.held_bytes
    assert not brought.assumptions


def test_a_synthetic_trace_gets_other_requests_to_its_own_model():
    spec = SyntheticSpec(layers=4, experts=12, top_k=3, sequences=5, prefill=4, decode=8, reach=1.0)
    trace = synthesize(spec)
    brought = equip(options(), Target("small", SHAPE, trace=trace))
    assert len(brought.content) == MADE_UP
    assert brought.assumptions == (
        f"assumed: activation matrices of {MADE_UP} other requests to the same synthetic model",
    )
    own = count(trace)
    assert not any((matrix == other).all() for matrix in own for other in brought.content)
    assert np.array_equal(brought.content[5:10], count(synthesize(replace(spec, text=2))))


def test_the_shipped_collection_is_of_tinymoe_and_of_these_scripts():
    made = load(FOLDER)
    assert made.counts.shape == (200, 8, 32)
    assert made.top_k == 4
    assert made.provenance["data"].endswith("test=False")
    here = Path(str(resources.files("moebench.systems.moe_infinity")))
    for script in SCRIPTS:
        assert made.provenance["scripts"][script] == hashlib.sha256((here / script).read_bytes()).hexdigest()


def test_prepare_counts_a_trace_of_a_geometry(tmp_path, capsys):
    shape = {"layers": 16, "experts": 64, "top_k": 8}
    trace = synthesize(SyntheticSpec(**shape, sequences=3, prefill=2, decode=4))
    path = trace.save(tmp_path / "t.safetensors")
    words = ["prepare", "system=moe_infinity", "model=olmoe-1b-7b", f"out={tmp_path / 'out'}"]
    assert main([*words, f"trace={path}"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    made = load(Path(document["artefact"]))
    assert np.array_equal(made.counts, count(trace))
    assert (made.model, made.trace_hash) == ("olmoe-1b-7b", trace.hash)
    assert main(words) == 2
    assert "olmoe-1b-7b only replays; give trace=FILE" in capsys.readouterr().err
    assert main([*words[:2], "model=mixtral-8x7b", words[3], f"trace={path}"]) == 2
    assert "16 layers of 64 experts, mixtral-8x7b has 32 of 8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"requests": 0}, "requests must be at least 1"), ({"trace": "a", "prompts": "b"}, "prompts has no effect")],
)
def test_prepare_refuses_what_cannot_be(changes, word):
    with pytest.raises(UsageError, match=word):
        PrepareOptions(**changes)


def test_a_replay_runs_through_the_harness_on_one_memory_and_on_two():
    common = {"system": "moe_infinity", "model": "deepseek-vl2-tiny", "quality": "none", "budget": "0.4"}
    short = {"workload.requests": 1, "workload.prompt_tokens": 8, "workload.new_tokens": 12, "warmup_tokens": 2}
    for hw in ("m4pro", "rtx5090_32gb"):
        (row,) = moebench.run(hw=hw, **common, **short, **{"system.ahead": 2})
        assert row.status == "ok", row.error
        assert row.fidelity == "advisory"
        assert row.protocol["counters"]["prefetched"] > 0
        assert any("other requests to the same synthetic model" in text for text in row.assumptions)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("packs"), "int4")


@pytest.mark.parametrize(("clock", "host"), [("wall", 0), ("virtual", 0), ("virtual", 8)])
@pytest.mark.parametrize("config", [options(ahead=3), options(match="masked", replace="incache"), options(match="off")])
def test_what_the_model_writes_is_that_of_everything_resident(lab, clock, host, config):
    """A batch of three sequences, few slots: the same tokens and logits, bit for bit."""
    start = np.random.default_rng(0).integers(0, 5, (6, lab.geometry.layers, lab.geometry.experts)).astype(float)
    tokens, logits = lab.run([load_plugins().system("resident").make(None, None)], full=True)
    system, watch = MoeInfinity(config, context(config, start, 12, batch=3, geometry=lab.geometry)), Watch()
    own, values = lab.run([system, watch], slots=12, host=host, clock=clock)
    assert own == tokens
    assert np.array_equal(values, logits)
    assert sum(r.prefetch_reads for r in watch.records) > 0
