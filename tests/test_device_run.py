"""Whole runs with device=cuda, on a simulated device; and where there is none, one line that says so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml
from harness_fixtures import LIVE, error_line, live, make_host, mini, packs, plugin  # noqa: F401 - fixtures
from simulated_device import LATE, NOW, RACE, OnCard, SimDevice

from moebench.backends import cuda_state
from moebench.cli import main
from moebench.commands.compose import register_groups, resolve, spelled
from moebench.engine.loop import Loop
from moebench.errors import UsageError
from moebench.harness import backend as backends
from moebench.harness.cell import run_cell
from moebench.harness.plan import plan
from moebench.plugins import load_plugins
from moebench.units import GIB

FEW = {"workload.requests": 1, "workload.new_tokens": 4, "warmup_tokens": 1}


@pytest.fixture
def machine(live, tmp_path, monkeypatch):  # noqa: F811
    """A machine with a card: hw=host says so, and moebench finds the simulated device."""
    card = yaml.safe_load(Path(load_plugins().hardware_path("rtx5090_32gb")).read_text())
    parts = ("unified", "memory", "storage", "bandwidth", "compute")
    make_host(tmp_path / "home", **{part: card[part] for part in parts})
    monkeypatch.setattr(cuda_state, "refusal", lambda: None)
    with OnCard():
        yield monkeypatch


def planned(*words):
    """The registry, and the cells of a command line."""
    registry = load_plugins()
    register_groups(registry)
    return registry, plan(resolve(spelled(words, False), registry), registry)


def run(patch, system, when=lambda stream, index: NOW, **options):
    """Answers (tokens, and the logits behind them) and row of a measured run."""
    device, kept, generate = SimDevice(when), [], Loop.generate
    words = {
        **LIVE,
        "system": system,
        "hw": "host",
        "device": "cuda",
        "mode": "measure",
        "budget": "0.4",
        **FEW,
        **options,
    }
    registry, (cell,) = planned(*(f"{key}={value}" for key, value in words.items()))

    def keep(self, *args, **kwargs):
        kept.append(generate(self, *args, **kwargs, keep_logits=True))
        return kept[-1]

    try:
        with patch.context() as more:
            more.setattr(backends, "open_device", lambda name: device)
            more.setattr(Loop, "generate", keep)
            row = run_cell(cell, registry)
        assert not device.pinned
    finally:
        device.close()
    return [g.tokens for g in kept], [np.stack(g.logits) for g in kept], row


def test_exact_systems_answer_as_everything_resident_does(machine):
    expected, rng = run(machine, "resident"), np.random.default_rng(0)
    machine.setattr(SimDevice, "notes", ("computed on a simulated device",))
    machine.setattr(SimDevice, "peak_bytes", lambda self: 123 * GIB)
    for system in ("specprefetch", "ssd_llama"):
        tokens, logits, row = run(machine, system, lambda stream, index: (NOW, LATE, RACE)[rng.integers(3)])
        assert tokens == expected[0]
        assert all(map(np.array_equal, logits, expected[1]))
        # A row books both memories and says where it computed.
        assert set(row.protocol["slots"]) == {"device", "host"}
        assert "computed on a simulated device" in row.assumptions
        assert row.metrics["allocator_peak_gib"].value == 123
        assert row.metrics["decode_tok_s"].provenance == "measured"
        assert row.config["device"] == "cuda"


def test_edge0s_heads_adapters_and_codec_serve_there(machine):
    _, plain, _ = run(machine, "edge0")
    rng = np.random.default_rng(7)
    _, coded, row = run(machine, "edge0", lambda stream, index: (NOW, LATE)[rng.integers(2)], codec="rans")
    assert all(map(np.array_equal, plain, coded))
    assert row.protocol["counters"]["predicted_layers"] > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("hw=m4pro", "chooses what a measured run computes on, and this one is modeled"),
        ("hw=host backend=mlx", "device= chooses what torch computes on; backend=mlx"),
        ("hw=host model=mini", "device=cuda chooses what computes, and a replay computes nothing"),
    ],
)
def test_what_a_card_has_no_meaning_for_is_refused(machine, words, said):
    with pytest.raises(UsageError, match=said):
        planned("system=lru", "device=cuda", "model=tinymoe", *words.split())


def test_a_profile_of_one_memory_is_refused(machine, tmp_path):
    make_host(tmp_path / "home")
    with pytest.raises(UsageError, match="hw=host declares none; make hw=host anew with 'moebench calibrate device="):
        planned("system=lru", "device=cuda", "model=tinymoe", "hw=host")


def test_a_system_that_moves_experts_on_storage_says_what_to_switch_off(machine):
    with pytest.raises(UsageError, match=r"bigmomo re-organises storage.*its own options switch re-organisation off"):
        run(machine, "bigmomo")


@pytest.mark.skipif(cuda_state.refusal() is None, reason="there is a card here")
def test_without_a_card_one_line_says_why(live, capsys):  # noqa: F811
    assert main(["run", "system=lru", "hw=m4pro", "model=tinymoe", "device=cuda"]) == 2
    assert f"device=cuda: {cuda_state.refusal()}; device=cpu computes on the processor" in error_line(capsys)
