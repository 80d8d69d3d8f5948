"""What Edge0 brings to a run, seen from the outside: bytes in the ledger and on the clock, what a row assumes, which
published figures stand beside it, and what is refused.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from engine_fixtures import make_trace

import moebench
from moebench.backends.base import Adapters
from moebench.errors import UsageError
from moebench.geometry import load
from moebench.plugins import load_plugins
from moebench.systems.edge0 import Edge0Config
from moebench.systems.edge0.equipment import CHANNEL, equip
from moebench.systems.edge0.heads import head_parameters
from moebench.systemspec import Equipment, Target
from moebench.trace.synthetic import SyntheticSpec, synthesize

SHORT = {"requests": 1, "prompt_tokens": 8, "new_tokens": 20}
QUIET = {"hw": "m4pro", "quality": "none", "warmup_tokens": 2, "workload": SHORT}
LARGE = "qwen3.6-35b-a3b"


def rows(model=LARGE, **options):
    return moebench.run(system="edge0", model=model, **QUIET, **options)


def value(row, name):
    return row.metrics[name].value


@pytest.fixture(scope="module")
def usual():
    return rows()


def test_published_figures_stand_beside_the_setting_they_were_taken_in_and_no_other(usual):
    assert [r.workload_name for r in usual] == ["synthetic", "published"]
    told = usual[1].metrics
    assert {n for n, m in told.items() if m.value is not None} == {
        "decode_tok_s",
        "allocator_peak_gib",
        "quality_delta",
    }
    assert (told["decode_tok_s"].value, told["allocator_peak_gib"].value, told["quality_delta"].value) == (
        20.4,
        2.9,
        -3.9,
    )
    assert all(m.provenance == "published" and "2609.18063" in m.source for m in told.values() if m.value is not None)
    for other in ({"system.k": 2}, {"system.lora": False}, {"system.prerouter": False}):
        assert len(rows(**other)) == 1
    assert len(moebench.run(system="lru", model=LARGE, **QUIET)) == 1


def test_the_published_model_is_served_as_published(usual):
    (counted,) = [r.protocol["counters"] for r in usual if "counters" in r.protocol]
    passes = SHORT["new_tokens"] - 1
    assert counted["predicted_layers"] == 32 * (passes - 1)  # layers 7 to 38; the gate routes the first token
    assert counted["router_layers"] == 8 * passes + 32
    assert counted["members"] == 4 * counted["sets_staged"]
    assert counted["dropped"] == 0
    assert 0.5 < counted["overlap"] < 0.7
    assert not any("K=" in line for line in usual[0].assumptions)
    assert any("shares 0.6 of the router's top 4" in line for line in usual[0].assumptions)
    assert any("heads of layers 6 to 37" in line for line in usual[0].assumptions)


def test_heads_and_adapters_are_in_the_ledger_and_on_the_clock(usual):
    geometry = load(load_plugins().model_path(LARGE))
    heads = 2 * 32 * head_parameters(geometry.hidden, geometry.experts)
    bare = rows(**{"system.lora": False})[0]
    off = rows(**{"system.lora": False, "system.prerouter": False})[0]
    assert (value(usual[0], "peak_active_gib") - value(bare, "peak_active_gib")) * 2**30 == pytest.approx(42e6)
    assert (value(bare, "peak_active_gib") - value(off, "peak_active_gib")) * 2**30 == pytest.approx(heads)
    native = {"stack": "native"}
    with_adapters, without = (rows(**native, **{"system.lora": on})[0] for on in (True, False))
    computed, bare = (row.details["split_ms_per_token"]["compute"] for row in (with_adapters, without))
    assert computed > bare  # while they compute, reads go on: the whole need not be slower


def test_adapters_are_counted_wherever_they_are_served():
    spec, geometry = load_plugins().system("edge0"), load(load_plugins().model_path(LARGE))
    trace = synthesize(SyntheticSpec(layers=40, experts=256, top_k=8, sequences=1, prefill=4, decode=8))
    told = [spec.equip(Edge0Config(**knobs), Target(LARGE, geometry, trace=trace)).adapted for knobs in (
        {}, {"prerouter": False}, {"lora": False},
    )]  # fmt: skip
    assert told == [310, 310, 0]
    with pytest.raises(ValueError, match="counts 2 of 1 adapters"):
        Equipment(adapters=Adapters(1.0, {"x": (np.zeros((1, 2)), np.zeros((2, 1)))}), adapted=2)


def test_a_cap_on_memory_counts_heads_and_adapters():
    fits = f"{int(value(rows()[0], 'peak_active_gib') * 2**30) + 1_000_000}B"
    assert rows(memory=fits)[0].status == "ok"
    with pytest.raises(UsageError, match="memory cap"):
        rows(memory=f"{int(fits[:-1]) - 50_000_000}B")


def test_the_clock_charges_the_bytes_of_heads():
    """Heads ten times as wide cost more time; nothing else changes."""
    spec = load_plugins().system("edge0")
    trace = synthesize(SyntheticSpec(layers=40, experts=256, top_k=8, sequences=1, prefill=4, decode=8))
    geometry = load(load_plugins().model_path(LARGE))
    equipment = spec.equip(Edge0Config(), Target(LARGE, geometry, trace=trace))
    assert equipment.content.head_bytes == 2 * head_parameters(2048, 256)
    told = []

    class View:
        geometry = replace(load(load_plugins().model_path(LARGE)), top_k=4)
        tiers = ("device",)

        def account(self, nbytes=0, syncs=0):
            told.append((nbytes, syncs))

        def resident(self, keys):
            return np.ones(len(keys), bool)

        in_flight = resident

    from moebench.engine.loop import replay_steps
    from moebench.systemspec import RunContext

    for fill, expected in (
        ("overlap", [(32 * equipment.content.head_bytes, 1)]),
        ("eager", [(equipment.content.head_bytes, 1)] * 32),
    ):
        told.clear()
        plugin = spec.make(Edge0Config(fill=fill), RunContext(View.geometry, 2000, "shared", equipment=equipment))
        plugin.begin_request(np.array([0]))
        decoded = next(step for step, *_ in replay_steps(trace, 1, 8) if step.phase)
        plugin.begin_step(decoded)
        for layer in range(40):
            plugin.prefetch(decoded, layer, View())
        plugin.prefetch(decoded, "end", View())
        assert told == expected


def channelled(width, first=True, column=0, k=8):
    """A trace of the large model with a channel of this width over layers 5 to 9."""
    trace = synthesize(SyntheticSpec(layers=40, experts=256, top_k=k, sequences=1, prefill=4, decode=6))
    channel = np.full((trace.tokens, 40, width), -1, np.int16)
    decoded = np.flatnonzero(trace.phase)[0 if first else 1 :]
    channel[decoded, 5:10] = np.arange(width)
    if column:
        channel[:, :, 0] = -1
    return replace(trace, channels={CHANNEL: channel})


def test_a_channel_says_what_was_executed_where_and_how_many():
    geometry = load(load_plugins().model_path(LARGE))
    brought = equip(Edge0Config(), Target(LARGE, geometry, trace=channelled(3)))
    assert (brought.top_k, brought.content.plan.consumers) == (3, (5, 6, 7, 8, 9))
    assert not any("surrogate" in line for line in brought.assumptions)
    for trace, config, hint in (
        (channelled(3), Edge0Config(k=4), "holds 3 experts for each token, not system.k=4"),
        (channelled(8, k=4), Edge0Config(), "holds 8 experts for each token, the trace's router chose 4"),
        (channelled(4, column=1), Edge0Config(k=9), "exceeds the 8 experts"),
        (make_trace(), Edge0Config(artefact="/nonexistent"), "no folder"),
    ):
        with pytest.raises(UsageError, match=hint):
            equip(config, Target(LARGE, geometry, trace=trace))


def test_options_that_would_change_nothing_are_refused():
    for words in ({"fill": "eager"}, {"first_token": "gate"}):
        with pytest.raises(UsageError, match="have an effect with"):
            Edge0Config(prerouter=False, **words)
    with pytest.raises(UsageError, match="no effect"):
        Edge0Config(prerouter=False, lora=False, artefact="x")
