"""Fitted nets: what is saved scores the same, what does not fit the model is one line, and a fit learns."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_fixtures import GEOMETRY, make_trace
from flashmoe_fixtures import random_nets, with_requests
from harness_fixtures import SHORT, mini, plugin  # noqa: F401 - fixtures

import moebench
from moebench.cli import main
from moebench.errors import UsageError
from moebench.plugins import load_plugins
from moebench.systems.flashmoe import FlashMoeConfig, artefact
from moebench.systems.flashmoe.equipment import equip
from moebench.systems.flashmoe.labels import Samples, samples
from moebench.systems.flashmoe.nets import GRID
from moebench.systems.flashmoe.training import Recipe, Stack, fit
from moebench.systemspec import Target

SHIPPED = Path(__file__).parents[1] / "systems" / "flashmoe" / "artefacts"
QUIET = {"epochs": "3", "requests": "4", "new_tokens": "24", "threads": "1"}
REPLAY = {"model": "mini", "hw": "m4pro", "budget": "0.4", "quality": "none", **SHORT}


def made(trace="abc", **changes) -> artefact.Fitted:
    nets = {kind: random_nets(kind) for kind in ("joint", "shared")}
    known = {"model": "small", "weights_hash": "w", "top_k": 3, "trace": trace, "preferred": "joint", "nets": nets}
    return artefact.Fitted(**{**known, **changes})


def live(**changes) -> Target:
    return dataclasses.replace(Target("small", GEOMETRY, "w"), **changes)


def test_what_is_saved_scores_the_same(tmp_path):
    before = made(provenance={"source": "a test"})
    after = artefact.load(artefact.save(before, tmp_path / "small"))
    rng = np.random.default_rng(0)
    for kind, nets in before.nets.items():
        recency, frequency = rng.random((2, 12))
        for layer in range(4):
            scores = [n.scores(layer, recency, frequency, np.arange(12)).tolist() for n in (nets, after.nets[kind])]
            assert scores[0] == scores[1]
    assert (after.model, after.trace, after.provenance) == ("small", "abc", {"source": "a test"})
    artefact.save(made(trace="def"), tmp_path / "small")
    assert artefact.load(tmp_path / "small").trace == "def"
    assert [p.name for p in tmp_path.iterdir()] == ["small"]


@pytest.mark.parametrize(
    ("target", "hint"),
    [
        (live(weights_hash="other"), "with weights w, small runs with weights other"),
        (live(geometry=dataclasses.replace(GEOMETRY, experts=16)), "with experts 12, small runs with experts 16"),
        (live(geometry=dataclasses.replace(GEOMETRY, top_k=2)), "with K 3, small runs with K 2"),
    ],
)
def test_nets_of_another_model_are_refused(tmp_path, target, hint):
    folder = artefact.save(made(), tmp_path / "small")
    with pytest.raises(UsageError, match=f"{hint}; fit some: moebench prepare system=flashmoe model=small"):
        equip(FlashMoeConfig(artefact=str(folder)), target)


def test_nets_fitted_on_the_very_trace_are_refused(tmp_path):
    trace = make_trace()
    folder = artefact.save(made(trace=trace.hash), tmp_path / "small")
    with pytest.raises(UsageError, match="fitted on the very trace that is replayed"):
        equip(FlashMoeConfig(artefact=str(folder)), live(trace=trace))
    other = equip(FlashMoeConfig(artefact=str(folder)), live(trace=make_trace(seed=1)))
    assert other.assumptions == (
        f"assumed: joint eviction nets fitted on another trace (routing of unknown origin, hash {trace.hash[:8]})",
    )


def test_the_users_own_nets_come_before_shipped_ones(tmp_path, monkeypatch):
    monkeypatch.setenv("MOEBENCH_HOME", str(tmp_path))
    for target in (live(), live(trace=make_trace())):
        with pytest.raises(
            UsageError, match=r"no eviction nets for small \(4 layers of 12 experts, K 3\).*system.net=none"
        ):
            artefact.find(target)
    folder = artefact.save(made(), tmp_path / "artefacts" / "flashmoe" / "small")
    assert artefact.find(live()) == artefact.find(live(trace=make_trace())) == folder
    only = artefact.save(
        made(preferred="shared", nets={"shared": random_nets("shared")}), tmp_path / "artefacts" / "flashmoe" / "small"
    )
    assert equip(FlashMoeConfig(), live()).content.kind == "shared"
    assert equip(FlashMoeConfig(net="none"), live()).content is None
    with pytest.raises(UsageError, match=f"{only} has shared nets only; fit joint ones: .* nets=joint"):
        equip(FlashMoeConfig(net="joint"), live())


def test_a_damaged_file_is_one_line(tmp_path):
    folder = artefact.save(made(), tmp_path / "small")
    whole = (folder / artefact.FILE).read_bytes()
    for damaged, hint in ((whole[:-9], "the artefact again"), (b"x" * 99, "no readable header")):
        (folder / artefact.FILE).write_bytes(damaged)
        with pytest.raises(UsageError, match=hint):
            artefact.load(folder)
    (folder / artefact.FILE).unlink()
    with pytest.raises(UsageError, match="no such file"):
        artefact.load(folder)


@pytest.mark.parametrize("name", [p.name for p in sorted(SHIPPED.iterdir())] if SHIPPED.is_dir() else [])
def test_shipped_nets_fit_their_model_and_say_where_they_come_from(name):
    fitted = artefact.load(SHIPPED / name)
    assert fitted.model == name
    assert {"source", "options", "versions", "scripts", "fits"} <= set(fitted.provenance)
    if name != "tinymoe":
        from moebench import geometry

        shape = geometry.load(load_plugins().model_path(name))
        assert fitted.shape == (shape.layers, shape.experts, shape.top_k)
    for kind, report in fitted.provenance["fits"].items():
        assert report["held_out_loss"] < report["held_out_variance"], kind


# --- fitting -------------------------------------------------------------------------------------------------------


def learnable(steps=400) -> Samples:
    """Expert e of each layer is needed again after a time that only its own number tells."""
    used = np.arange(steps)[:, None, None] % np.array([2, 3, 5, 7])[None, None, :] == 0
    used = np.repeat(used, 2, axis=1)
    recency = np.random.default_rng(0).random(used.shape).astype(np.float32)
    target = np.broadcast_to(np.array([0.1, 0.3, 0.6, 0.9], np.float32), used.shape)
    return Samples(recency, np.zeros_like(recency), np.ascontiguousarray(target), np.arange(steps) >= 300)


@pytest.mark.parametrize(("kind", "least"), [("joint", 0.0), ("shared", 0.08)])
def test_joint_nets_tell_experts_apart_and_shared_ones_cannot(kind, least):
    nets, report = fit(kind, 8, learnable(), Recipe(0.01, 40, 40, 0), lambda *a: None)
    assert least <= report["held_out_loss"] < 0.1
    if kind == "joint":
        scores = nets.scores(1, np.full(4, 0.5), np.zeros(4), np.arange(4))
        assert scores == pytest.approx([0.1, 0.3, 0.6, 0.9], abs=0.05)


def test_what_is_stored_is_what_was_fitted():
    torch.manual_seed(0)
    for kind in ("joint", "shared"):
        stack = Stack(kind, 2, 4, 8)
        nets = fit(kind, 8, learnable(), Recipe(0.01, 1, 1, 0), lambda *a: None)[0]
        nets = dataclasses.replace(nets, weights=stack.stored())
        x = np.random.default_rng(1).random((2, 4))
        with torch.no_grad():
            rows = np.concatenate(x)[None] if kind == "joint" else x.T
            said = stack(torch.tensor(np.stack([rows] * 2), dtype=torch.float32))[1].numpy().ravel()
        assert nets.scores(1, x[0], x[1], np.arange(4)) == pytest.approx(said, abs=50 / GRID)


def test_a_fit_ends_when_nothing_is_gained_and_keeps_the_best():
    told = []
    data = samples(with_requests(make_trace(120), 12), 4, 9, 0.25)
    _, report = fit("joint", 16, data, Recipe(0.05, 60, 3, 0), lambda text, done, total: told.append(text))
    assert report["epochs"] == report["best_epoch"] + 3 < 60
    losses = [float(text.rpartition(" ")[2]) for text in told]
    assert min(losses) == pytest.approx(report["held_out_loss"], abs=1e-4)
    assert losses[-1] > min(losses)


def test_one_seed_one_result_on_one_machine():
    data = samples(with_requests(make_trace(120), 12), 4, 9, 0.25)
    first, second, other = (
        fit("shared", 8, data, Recipe(0.01, 2, 2, seed), lambda *a: None)[0].weights.tobytes() for seed in (0, 0, 1)
    )
    assert first == second != other


# --- the commands --------------------------------------------------------------------------------------------------


def prepare(*given: str, **changes) -> int:
    words = {**QUIET, "model": "mini", **changes}
    return main(["prepare", "system=flashmoe", *given, *(f"{k}={v}" for k, v in words.items() if v is not None)])


def test_a_geometry_is_prepared_on_other_routing_and_then_runs(mini, tmp_path, capsys):  # noqa: F811
    with pytest.raises(UsageError, match=r"no eviction nets for mini .*: moebench prepare system=flashmoe model=mini"):
        moebench.run(system="flashmoe", **REPLAY)
    assert prepare() == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    fitted = artefact.load(Path(document["artefact"]))
    assert set(fitted.nets) == {"shared"}, "joint nets know experts by name, and another seed is another model"
    assert fitted.provenance["source"] == "moebench.trace.synthetic, seed 1"
    rows = {net: moebench.run(system="flashmoe", **REPLAY, **{"system.net": net})[0] for net in ("auto", "none")}
    assert [row.status for row in rows.values()] == ["ok", "ok"]
    lru = moebench.run(system="lru", scope="per_layer", **REPLAY)[0]
    for name in ("decode_tok_s", "hit_rate", "ssd_mib_per_token", "peak_active_gib"):
        assert rows["none"].metrics[name].value == lru.metrics[name].value
    assert rows["auto"].metrics["peak_active_gib"].value > lru.metrics["peak_active_gib"].value
    assert any("shared eviction nets fitted on another trace" in a for a in rows["auto"].assumptions)
    counted = rows["auto"].protocol["counters"]
    assert 0 < counted["refetched_within_5"] <= counted["evictions"]
    assert counted["policy_seconds"] > 0 == rows["none"].protocol["counters"]["policy_seconds"]
    early = moebench.run(system="flashmoe", **REPLAY, **{"system.late": "false"})[0]
    assert early.protocol["counters"]["evictions"] < counted["evictions"], "the free slot costs evictions on one memory"


def test_a_trace_is_fitted_with_both_kinds(mini, tmp_path, capsys):  # noqa: F811
    assert main(["trace", "synth", f"out={tmp_path / 't'}", "model=mini", "prefill=8", "decode=24", "sequences=4"]) == 0
    assert prepare(trace=tmp_path / "t", requests=None, new_tokens=None, nets="both", out=tmp_path / "out") == 0
    fitted = artefact.load(tmp_path / "out" / "mini")
    assert set(fitted.nets) == {"joint", "shared"}
    assert fitted.provenance["source"] == "t"
    rates = fitted.provenance["held_out_hit_rates"]
    assert set(rates) == {"lru", "joint", "shared"}
    assert sum(rates[fitted.preferred]) == max(sum(rates[kind]) for kind in fitted.nets)


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"trace": "x"}, "prompts, requests and new_tokens have no effect with trace=FILE"),
        ({"prompts": "x"}, "mini only replays, it answers no prompts"),
        ({"horizon": "0.05"}, "horizon=0.05 of 16 experts is less than 2 steps"),
        ({"held_out": "1"}, "held_out must lie between 0 and 1"),
        ({"epochs": "0"}, "epochs must be at least 1"),
        ({"nets": "deep"}, "auto, both, joint, shared"),
    ],
)
def test_wrong_use_is_one_line(mini, capsys, changes, hint):  # noqa: F811
    assert prepare(**changes) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert hint in line
