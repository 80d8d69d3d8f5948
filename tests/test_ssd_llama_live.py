"""ssd_llama computes what a resident model computes, bit by bit: with any codec, tiers, engine and order of arrival."""

from __future__ import annotations

from functools import partial
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from ssd_llama_fixtures import ALL, options

from moebench import hardware
from moebench.backends.torch_model import TorchBackend
from moebench.config import RunConfig, WorkloadConfig
from moebench.engine.loop import Loop
from moebench.errors import UsageError
from moebench.harness.assets import load_live
from moebench.harness.plan import Cell, embedded_folder
from moebench.harness.session import open_session
from moebench.plugins import load_plugins
from moebench.store.engines import open_engine

TOKENS = 6
LATE = {"inner": "direct", "reorder": 3, "delay_s": 0.0002}
ENGINES = {"direct": {}, "uring": {}, "mmap": {}, "faulty": LATE}


class Tiny:
    """tinymoe, packed with and without compression, behind one backend each."""

    def __init__(self) -> None:
        self.registry, self.folder = load_plugins(), embedded_folder()
        self.models = {
            codec: load_live(self.folder, "tinymoe", "int4", "packed", "", codec) for codec in ("none", "rans")
        }
        self.backends = {
            codec: TorchBackend(m.pack, m.pack.dense_path, m.config, attention="eager", numerics="row_invariant")
            for codec, m in self.models.items()
        }
        model = self.models["none"]
        text = (Path(str(resources.files("moebench.models.tinymoe"))) / "tasks" / "prompts.jsonl").read_text()
        self.prompts = [model.tokenizer(line)["input_ids"][:24] for line in text.splitlines()[:2]]

    def run(self, system="ssd_llama", codec="none", engine="direct", clock="wall", opened=None, knobs=None, **config):
        """Tokens, logits and the session's end, for one batch of prompts."""
        model, backend, spec = self.models[codec], self.backends[codec], self.registry.system(system)
        knobs = knobs or spec.config()
        hw = "m4pro" if clock == "wall" else "rtx5090_32gb"
        profile = hardware.load(self.registry.hardware_path(hw))
        settings = dict(budget="0.35", scope="shared", workload=WorkloadConfig(batch=2), chunk=ALL) | config
        whole = RunConfig(system, hw, knobs, model="tinymoe", codec=codec, **settings)
        cell = Cell(whole, spec, profile, clock, "test", engine, folder=self.folder)
        engines = SimpleNamespace(engine=lambda name: partial(open_engine, name, **(opened or {})))
        session = open_session(
            cell, model.geometry, engines, pack=model.pack, dense_bytes=backend.dense_bytes, dense_bits=16.0,
            kv_bytes=backend.kv_bytes, batch=2, context=40, longest_prompt=24,
        )  # fmt: skip
        try:
            for tier in session.experts.tiers:
                if system == "ssd_llama":
                    tier.arena[:] = 0xFF  # bytes that nobody loaded are no numbers
            out = Loop(backend, session.experts, ALL).generate(self.prompts, TOKENS, keep_logits=True)
            session.experts.drain()
            session.experts.check_integrity()
        finally:
            session.close()
        return out.tokens, np.stack(out.logits), session


@pytest.fixture(scope="module")
def tiny():
    return Tiny()


@pytest.fixture(scope="module")
def resident(tiny):
    return tiny.run("resident")


def check_same(found, resident):
    assert found[0] == resident[0]
    assert np.array_equal(found[1], resident[1])
    return found[2]


@pytest.mark.parametrize("device", ["auto", "0.4"])
@pytest.mark.parametrize("codec", ["none", "rans"])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_same_bits_with_any_codec_engine_and_tiers(tiny, resident, engine, codec, device):
    """One pinned buffer, reads that end in any order, temporary slots, experts that come down and go up again."""
    knobs = options(pool=1, temporary=8, promote_after=1)
    run = tiny.run(codec=codec, engine=engine, opened=ENGINES[engine], knobs=knobs, device_budget=device)
    session = check_same(run, resident)
    assert session.experts.hooks.report()["temporary"] > 0
    assert (session.experts.host is not None) == (device != "auto")
    assert session.timeline.engine.coded == (codec == "rans" and device != "auto")


@pytest.mark.parametrize("codec", ["none", "rans"])
@pytest.mark.parametrize("knobs", [{"temporary": 0, "score": "recency"}, {"tiers": "two"}, {"pool": 0}])
def test_the_same_bits_on_the_modeled_clock(tiny, resident, codec, knobs):
    run = tiny.run(codec=codec, clock="virtual", knobs=options(**knobs), device_budget="0.4")
    session = check_same(run, resident)
    if knobs.get("score"):
        assert session.experts.host.slots > 16


def test_what_came_down_decoded_is_not_decoded_again(tiny, resident):
    """Few device slots, all lasting: experts leave for the host as they are computed on and come back from there."""
    session = check_same(
        tiny.run(codec="rans", knobs=options(temporary=0, score="recency"), device_budget="0.2", budget="0.6"), resident
    )
    moves = session.timeline._moves
    held = {k for k in range(session.experts.geometry.keys) if k in session.experts.host}
    assert held - moves._stored
    assert held & moves._stored


@pytest.mark.parametrize("clock", ["wall", "virtual"])
@pytest.mark.parametrize("placement", ["1", "4", "auto"])
def test_the_same_bits_wherever_experts_run(tiny, resident, placement, clock):
    run = tiny.run(clock=clock, knobs=options(placement=placement), device_budget="0.4")
    session = check_same(run, resident)
    assert session.experts.hooks.report()["on_host"] > 0


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"knobs": options(placement="1"), "device_budget": "0.4", "codec": "rans"}, "use codec=none"),
        ({"knobs": options(placement="1")}, "device_budget= splits it"),
        ({"knobs": options(tiers="two")}, "device_budget= splits it"),
    ],
)
def test_options_that_a_run_gives_no_meaning_are_refused(tiny, changes, word):
    with pytest.raises(UsageError, match=word):
        tiny.run(**changes)


def test_single_matrices_are_refused_live():
    import moebench

    with pytest.raises(UsageError, match="slots of single matrices are for replays"):
        moebench.run(system="ssd_llama", hw="m4pro", model="tinymoe", quality="none", **{"system.granularity": "gate"})
