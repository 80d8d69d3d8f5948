"""A long replay with real reads: memory, descriptors and threads stay flat from session to session, tiers and ledger
agree at every step, and every expert that is served has its own bytes.
"""

from __future__ import annotations

import gc
import os
from dataclasses import replace

import numpy as np
import pytest
from fault_fixtures import TIMES, tally
from test_faults_reads import Count, held, planned, registry

from moebench.engine.loop import replay
from moebench.geometry import Geometry
from moebench.harness.session import open_session
from moebench.hookspecs import hookimpl
from moebench.store.layout import QuantSpec
from moebench.store.writer import write_random_pack
from moebench.systemspec import Target
from moebench.testing.audit import Audit
from moebench.testing.packs import contents
from moebench.trace.synthetic import SyntheticSpec, synthesize

GEOMETRY = Geometry("soak", layers=4, experts=16, top_k=2, hidden=64, intermediate=64, other_parameters=1000)
SESSIONS = 12 if TIMES == 1 else 50  # of one system
TOKENS = 40 * TIMES  # decoded in each
NOISE_BYTES = 1 << 20  # growth over half the sessions that an allocator may show


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    """A random pack of small experts, and what is in it."""
    g = GEOMETRY
    folder = tmp_path_factory.mktemp("soak")
    made = write_random_pack(folder / "p", g.layers, g.experts, g.hidden, g.intermediate, QuantSpec(g.quant, g.group))
    return made, contents(made)


class Forgetful:
    """An observer that drops what the audit would keep of every step."""

    def __init__(self, audit: Audit) -> None:
        self.audit, self.audit.logging = audit, False

    @hookimpl
    def end_step(self) -> None:
        self.audit.records.clear()


def session_of(system: str, engine: str, pack, truth, number: int) -> tuple[int, dict]:
    """One measured replay from opening to closing; returns tokens and what the system counted."""
    cell = planned(system, "packed", "auto")[0]
    if system == "bigmomo":
        cell = replace(cell, config=replace(cell.config, knobs=replace(cell.config.knobs, reorganise=True, history=4)))
    cell = replace(cell, clock="wall", engine=engine, geometry=GEOMETRY, config=replace(cell.config, budget="0.4"))
    spec = SyntheticSpec(layers=4, experts=16, top_k=2, sequences=2, prefill=4, decode=TOKENS // 2, seed=number)
    trace = synthesize(spec)
    equipment = cell.spec.equip(cell.config.knobs, Target("soak", GEOMETRY, trace=trace))
    audit, count = Audit(truth), Count()
    session = open_session(
        cell, GEOMETRY, registry(), pack=pack, dense_bytes=0, equipment=equipment, kv_bytes=lambda: 0,
        observers=[audit, Forgetful(audit), count],
    )  # fmt: skip
    try:
        audit.attach(session)
        replay(trace, session.experts, 1, 16, equipment.acceptance, number)
        audit.finish()
        session.timeline.engine.check_integrity()
        return count.tokens, session.hooks.report()
    finally:
        session.close()


def resident_bytes() -> int:
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def growth(samples: list[int]) -> float:
    """Bytes by which the second half of ``samples`` surely grew: a line's slope less three standard errors."""
    half = np.array(samples[len(samples) // 2 :], float)
    at = np.arange(len(half)) - (len(half) - 1) / 2
    slope = (at * half).sum() / (at**2).sum()
    left = half - half.mean() - slope * at
    error = np.sqrt((left**2).sum() / max(1, len(half) - 2) / (at**2).sum())
    return (slope - 3 * error) * len(half)


def soak(system: str, engine: str, pack, truth) -> tuple[int, float, dict]:
    """Sessions one after the other; returns tokens, surely grown bytes, and what the last one counted."""
    tokens, memory, counted = 0, [], {}
    for number in range(SESSIONS):
        found, counted = session_of(system, engine, pack, truth, number)
        tokens += found
        memory.append(resident_bytes())
        if number == 0:
            before = held()
        assert held() == before, "descriptors or threads grew"
    return tokens, growth(memory), counted


@pytest.mark.parametrize(("system", "engine"), [("lru", "direct"), ("bigmomo", "pread")])
def test_nothing_grows(pack, system, engine):
    tokens, grown, counted = soak(system, engine, *pack)
    assert tokens >= SESSIONS * TOKENS * 0.9
    assert system != "bigmomo" or counted["swaps"] > 0
    assert grown < NOISE_BYTES
    tally(
        "soak", f"{system} over {engine}", tokens, f"{SESSIONS} sessions, surely grown by {max(0.0, grown):.0f} bytes"
    )


def test_a_leak_would_show_and_noise_would_not():
    rng = np.random.default_rng(0)
    noise = rng.integers(-(1 << 17), 1 << 17, SESSIONS)
    assert growth(list((1 << 28) + noise)) < NOISE_BYTES
    assert growth(list((1 << 28) + noise + np.arange(SESSIONS) * (1 << 19))) > NOISE_BYTES
