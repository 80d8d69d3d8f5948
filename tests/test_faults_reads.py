"""Reads that fail, lie, end early and dawdle under whole runs: every expert that is computed on has its own bytes, or
the run ends in one line; threads, descriptors and locks are given back either way.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fault_fixtures import TIMES, tally
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from read_fixtures import NO_URING, READERS

from moebench.commands.compose import typed
from moebench.engine.loop import replay
from moebench.errors import MoebenchError
from moebench.geometry import Geometry
from moebench.harness.plan import plan
from moebench.harness.session import open_session
from moebench.hookspecs import hookimpl
from moebench.plugins import load_plugins
from moebench.step import PREFILL
from moebench.store.engines import StoreError
from moebench.store.layout import QuantSpec
from moebench.store.pack import Pack
from moebench.store.writer import write_random_pack
from moebench.systemspec import Target
from moebench.testing.audit import Audit
from moebench.testing.lab import deadline
from moebench.testing.packs import contents
from moebench.trace.format import load

TRACES = Path(__file__).parents[1] / "results" / "baseline" / "traces"
ENGINES = [*READERS, *(["uring"] if NO_URING is None else [])]
LAYOUTS = {"packed": "none", "checkpoint": "none", "scattered": "none", "packed_gate_up": "none", "rans": "rans"}
SYSTEMS = {
    "lru": {"id": "lru"},
    "edge0": {"id": "edge0"},
    "bigmomo": {"id": "bigmomo", "reorganise": False},
    "specprefetch": {"id": "specprefetch"},
    "ssd_llama": {"id": "ssd_llama"},
}
FAULTS = {
    "none": {},
    "short reads": {"short_read": 0.3},
    "latency spikes": {"delay_s": 0.02, "spike": 0.02, "reorder": 3},
    "a few errors": {"eio": 0.002},
    "errors": {"eio": 0.05},
    "flipped bits": {"bit_flip": 0.01, "reorder": 2},
    "everything": {"eio": 0.001, "short_read": 0.2, "bit_flip": 0.001, "delay_s": 0.01, "spike": 0.02, "reorder": 4},
}
HARMLESS = ("none", "short reads", "latency spikes")


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    """Random packs in tinymoe's geometry by layout, and what is in them, made when asked for."""
    folder = tmp_path_factory.mktemp("packs")

    @cache
    def made(layout: str) -> tuple[Pack, np.ndarray]:
        g = geometry()
        pack = write_random_pack(
            folder / layout, g.layers, g.experts, g.hidden, g.intermediate, QuantSpec(g.quant, g.group),
            layout="packed" if layout == "rans" else layout, codec=LAYOUTS[layout],
        )  # fmt: skip
        return pack, contents(pack)

    return made


@cache
def registry():
    return load_plugins(quiet=True)


@cache
def planned(system: str, layout: str, device_budget: str):
    """A replay cell of a system on tinymoe's geometry, and its trace."""
    own = TRACES / f"tinymoe-{system}.safetensors"
    path = own if own.is_file() else TRACES / "tinymoe.safetensors"
    config = typed(
        {
            "system": SYSTEMS[system], "hw": "m4pro", "model": "tinymoe", "quality": {"suite": "none"}, "chunk": 16,
            "workload": {"kind": "trace", "path": str(path)}, "device_budget": device_budget, "codec": LAYOUTS[layout],
            "layout": "packed" if layout == "rans" else layout,
        },
        registry(),
    )  # fmt: skip
    return plan(config, registry())[0], load(path)


@cache
def geometry() -> Geometry:
    return planned("lru", "packed", "auto")[0].geometry


class Stopwatch:
    """An observer that acts at one pass."""

    def __init__(self, at: int, act) -> None:
        self.at, self.act = at, act

    @hookimpl
    def end_step(self, step) -> None:
        if step.index == self.at:
            self.act()


def run(pack, truth, system, layout, *, budget="0.3", tiers=1, clock="wall", rows=96, observers=(), **engine):
    """Walk a trace with real reads; returns (tokens that were decoded, what the faulty engine injected)."""
    cell, trace = planned(system, layout, "0.5" if tiers == 2 else "auto")
    cell = replace(cell, clock=clock, engine=engine["inner"], config=replace(cell.config, budget=budget))
    trace = trace.take(slice(0, rows))
    made = []

    def opened(pack, **options):
        if engine["inner"] == "uring":  # a modeled clock reads through pread, which cuts reads
            options.pop("block_bytes", None)
        made.append(registry().engine("faulty")(pack, **{**options, **engine}))
        return made[-1]

    equipment = cell.spec.equip(cell.config.knobs, Target(geometry().name, geometry(), trace=trace))
    audit, observer = Audit(truth), Count()
    session = open_session(
        cell, geometry(), SimpleNamespace(engine=lambda name: opened), pack=pack, dense_bytes=0, equipment=equipment,
        kv_bytes=lambda: 0, observers=[audit, observer, *observers], longest_prompt=64, context=128,
    )  # fmt: skip
    try:
        audit.attach(session)
        replay(trace, session.experts, 1, cell.config.chunk, equipment.acceptance, 0)
        session.experts.drain()
        audit.finish()
        made[-1].check_integrity()
    finally:
        session.close()
    return observer.tokens, dict(made[-1].injected)


class Count:
    """An observer that counts decoded tokens."""

    def __init__(self) -> None:
        self.tokens = 0

    @hookimpl
    def end_step(self, step) -> None:
        self.tokens += step.emits if step.phase != PREFILL else 0


def held() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def attempt(what: str, *arguments, **options) -> tuple[str, dict]:
    """``right`` or the line that a run ended with; it ends in time, and leaves no thread and no descriptor."""
    before = held()
    try:
        with deadline(60, what):
            tokens, injected = run(*arguments, **options)
            assert tokens > 0
            found = "right", injected
    except (StoreError, MoebenchError) as error:
        found = str(error), {}
    assert "\n" not in found[0]
    assert held() == before, "threads or descriptors were not given back"
    return found


OUTCOMES: dict[tuple[str, str], list[int]] = {}


@given(
    engine=st.sampled_from(ENGINES), layout=st.sampled_from(list(LAYOUTS)), system=st.sampled_from(list(SYSTEMS)),
    tiers=st.sampled_from([1, 2]), clock=st.sampled_from(["wall", "virtual"]), fault=st.sampled_from(list(FAULTS)),
    seed=st.integers(0, 2**30), pool=st.sampled_from([0, 1, 2]), threads=st.sampled_from([1, 4]),
    budget=st.sampled_from(["0.4", "0.7"]),
)  # fmt: skip
@settings(
    max_examples=15 if TIMES == 1 else 40 * TIMES,
    deadline=None,
    derandomize=TIMES == 1,
    database=None,
    phases=[Phase.explicit, Phase.generate],
)
def test_whatever_storage_does_a_run_is_right_or_ends_in_one_line(
    packs, engine, layout, system, tiers, clock, fault, seed, pool, threads, budget
):
    pack, truth = packs(layout)
    options = {"inner": engine, "seed": seed, "threads": threads, **FAULTS[fault]}
    lands = layout == "rans" or (engine in ("direct", "uring") and layout != "packed")
    if pool and lands and not (layout == "rans" and tiers == 2):
        options["pool"] = pool
    words = f"{engine} {layout} {system} {tiers} {clock} {fault}"
    outcome, injected = attempt(words, pack, truth, system, layout, budget=budget, tiers=tiers, clock=clock, **options)
    counts = OUTCOMES.setdefault((fault, engine), [0, 0, 0])
    counts[0 if outcome == "right" else 1] += 1
    counts[2] += sum(injected.values())
    if fault in HARMLESS and outcome != "right":
        assert "short read" in outcome, outcome  # three in a row of one piece are given up
        assert fault == "short reads"
    if outcome != "right":
        assert "experts.bin: layer " in outcome, outcome


def test_the_count_of_what_was_injected():
    """Both kinds of end were met, or the test above tested nothing."""
    assert sum(right for right, _, _ in OUTCOMES.values()) > 2
    assert sum(failed for (fault, _), (_, failed, _) in OUTCOMES.items() if fault in ("errors", "flipped bits")) > 1
    for (fault, engine), (right, failed, _) in sorted(OUTCOMES.items()):
        tally(fault, f"runs over {engine}", right + failed, f"{right} right, {failed} ended in one line")


# --- files that change under a run -----------------------------------------------------------------------------------


def cut(pack: Pack) -> None:
    os.truncate(pack.file_path, pack.file_path.stat().st_size // 3)


def overwrite(pack: Pack) -> None:
    with open(pack.file_path, "r+b") as file:
        file.write(os.urandom(pack.file_path.stat().st_size))


def swap_for_another(pack: Pack) -> None:
    shutil.copyfile(pack.file_path, other := pack.path / "other")
    os.truncate(other, 100)
    os.replace(other, pack.file_path)


CHANGES = {"cut short": cut, "removed": lambda pack: pack.file_path.unlink(), "replaced": swap_for_another}
CHANGES |= {"overwritten": overwrite, "folder removed": lambda pack: shutil.rmtree(pack.path)}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("change", list(CHANGES))
def test_a_pack_that_changes_under_a_run_is_right_or_ends_in_one_line(packs, tmp_path, engine, change):
    for layout in list(LAYOUTS) if TIMES > 1 else ["packed", "rans"]:
        original, truth = packs(layout)
        shutil.copytree(original.path, tmp_path / layout)
        pack = Pack.open(tmp_path / layout)
        watch = Stopwatch(6, partial(CHANGES[change], pack))
        words = f"{engine} {layout} {change}"
        outcome, _ = attempt(words, pack, truth, "lru", layout, observers=[watch], inner=engine, budget="0.1")
        if change in ("removed", "folder removed", "replaced"):  # what is open stays what it was
            assert outcome == "right", outcome
        else:
            assert "experts.bin: layer " in outcome
            assert "short read" in outcome if change == "cut short" else "damaged" in outcome, outcome
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(pack.path)
        tally(f"experts.bin {change}", f"run over {engine}, {layout}", 1, outcome[:40].split(":")[0])


def test_the_check_can_fail(packs, monkeypatch):
    """With an engine that does not look at hashes, flipped bits reach whoever computes, and the audit says so."""
    pack, truth = packs("packed")
    monkeypatch.setattr(Pack, "check", lambda *_: None)
    with pytest.raises(AssertionError, match="bytes that are not its own"):
        run(pack, truth, "lru", "packed", inner="pread", bit_flip=0.2, seed=1)
