"""Traces for the suite, and replays of them: recorded with the system, made uniform, made to part at a token.

A recorded trace holds what the system predicted or drafted, so that its replay makes up nothing. Knows no system.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from moebench.engine.loop import replay as walk
from moebench.harness.cell import demands
from moebench.harness.matrices import by_matrix
from moebench.harness.plan import EMBEDDED, Cell
from moebench.harness.session import open_session
from moebench.hookspecs import hookimpl
from moebench.step import ABSENT, DECODE, PREFILL, Step
from moebench.systemspec import Target
from moebench.testing.audit import Audit
from moebench.testing.lab import Arrangement, Lab, Run, deadline
from moebench.testing.subject import Subject
from moebench.trace.format import Trace
from moebench.trace.record import Recorder

ANY_GEOMETRY = "qwen3.6-35b-a3b"  # plans a replay; the model's own geometry takes its place
TAIL = 5  # decoded tokens from where two traces part
COPIES = 10  # of the recorded requests, each with routing of its own
RECORDING = Arrangement("recording", budget="1.0", batches=((0,), (1,)), tokens=9)


class Tape:
    """An observer that writes down the routing of a live run, with what the system said of it beforehand."""

    def __init__(self, name: str, audit: Audit) -> None:
        self.name, self.audit, self.recorder, self.request = name, audit, Recorder(), -1

    @hookimpl
    def begin_request(self) -> None:
        """Requests are numbered in their order."""
        self.request += 1

    @hookimpl
    def end_step(self, step: Step) -> None:
        """A pass is over."""
        numbered = replace(step, sequence=step.sequence + self.request)
        self.recorder.add_step(numbered, self.audit.native, self._channels(step))

    def _channels(self, step: Step) -> dict[str, np.ndarray]:
        """What was predicted, by channel, int16 [N, L, k]: by the system's own word, else what it routed ahead."""
        hooks, executed = self.audit.session.hooks, self.audit.executed
        said = hooks.predicted(step) if hooks.predicted is not None else None
        if said is not None:
            return {f"predicted.{name}": np.asarray(ids, np.int16) for name, ids in said.items()}
        k = self.audit.experts.geometry.top_k
        ahead = np.full((step.rows, len(executed), k), ABSENT, np.int16)
        for layer, routing in enumerate(executed):
            if routing.ahead:
                ahead[:, layer] = routing.experts
        return {f"predicted.{self.name}": ahead}


def record(lab: Lab, subject: Subject) -> Trace:
    """Two requests of the live model under the system: its channels, where it has any, and its drafts. Of one that only
    replays, under everything resident.
    """
    if subject.spec.handling(subject.knobs).matrices:
        subject = lab.reference
    audit = Audit(lab.truth)
    tape = Tape(subject.name, audit)
    lab.fresh(subject, RECORDING, audit, tape)
    trace = tape.recorder.trace({"model": "tinymoe", "experts": lab.geometry.experts, "source": "conformance suite"})
    kept = {n: array for n, array in trace.channels.items() if n.startswith("drafts.") or (array != ABSENT).any()}
    return replace(trace, channels=kept)


def uniform(trace: Trace, seed: int = 0) -> Trace:
    """The trace several times over, every routing and every prediction drawn uniformly and independently."""
    rng, rows = np.random.default_rng(seed), np.tile(np.arange(trace.tokens), COPIES)
    copy = np.repeat(np.arange(COPIES, dtype=np.int32), trace.tokens)
    sequence = trace.sequence[rows] + copy * (trace.sequence.max() + 1)

    def drawn(ids: np.ndarray) -> np.ndarray:
        flat = rng.random((ids[..., 0].size, trace.expert_count)).argsort(axis=1)[:, : ids.shape[-1]]
        return np.where(ids == ABSENT, ABSENT, flat.reshape(ids.shape)).astype(np.int16)

    channels = {name: array[rows] for name, array in trace.channels.items()}
    for name, array in channels.items():
        if array.dtype == np.int16 and array.ndim > 2:  # predictions, and what drafts route to
            channels[name] = drawn(array)
    return Trace(
        drawn(trace.experts[rows]), trace.phase[rows], sequence, trace.position[rows],
        None if trace.weights is None else trace.weights[rows], channels, trace.metadata,
    )  # fmt: skip


def parted(trace: Trace, at: int, layer: int) -> Trace:
    """Another trace that is the same up to ``layer`` of row ``at`` and from there on routes to the experts beside. What
    was drafted up to that row, and predicted up to the next, was said before, and is the same.
    """
    row = np.arange(trace.tokens)[:, None]
    later = (row > at) | ((row == at) & (np.arange(trace.layers) >= layer))

    def beside(ids: np.ndarray, where: np.ndarray) -> np.ndarray:
        where = where.reshape(*where.shape, *[1] * (ids.ndim - where.ndim))
        return np.where(where & (ids != ABSENT), (ids + 1) % trace.expert_count, ids).astype(np.int16)

    channels = dict(trace.channels)
    for name, array in channels.items():
        if array.dtype == np.int16 and array.ndim > 2:
            said = (
                at + 1 if name.startswith("predicted.") else at
            )  # of the next token, while this one's pass is under way
            channels[name] = beside(array, row > said)
    return replace(trace, experts=beside(trace.experts, later), channels=channels)


def middle(trace: Trace) -> tuple[int, int, Callable[[Step, int], bool]]:
    """A row late in the last request, a layer in the middle, and whether a pass at some layer has come to them."""
    row, middle_layer = int(np.flatnonzero(trace.phase == DECODE)[-TAIL]), trace.layers // 2
    sequence, position = int(trace.sequence[row]), int(trace.position[row])

    def reached(step: Step, layer: int) -> bool:
        here = step.sequence == sequence
        beyond = (step.sequence > sequence) | (here & (step.position > position))
        return bool(beyond.any() or (layer >= middle_layer and (here & (step.position == position)).any()))

    return row, middle_layer, reached


def replay_cell(lab: Lab, subject: Subject, hw: str = "", batch: int = 1, **options: Any) -> Cell:
    """A replay on a modeled machine, refused as ``moebench run`` would refuse it."""
    cell = lab.planned(subject, hw=hw or subject.hw, model=ANY_GEOMETRY)
    workload = replace(cell.config.workload, batch=batch)
    config = replace(cell.config, **{"budget": "0.35", "model": EMBEDDED, "workload": workload, **options})
    return replace(cell, config=config, geometry=lab.geometry)


def replay(lab: Lab, subject: Subject, trace: Trace, audit: Audit, **options: Any) -> Run:
    """Walk a trace through the loop on a modeled clock."""
    with deadline(lab.seconds, f"{subject.name}, replay"):
        cell = replay_cell(lab, subject, **options)
        config, geometry = cell.config, lab.geometry
        if subject.spec.handling(subject.knobs).matrices:
            geometry, trace = by_matrix(geometry, trace, config.layout, config.codec)
        equipment = subject.spec.equip(subject.knobs, Target(geometry.name, geometry, trace=trace))
        prompts = np.unique(trace.sequence[trace.phase == PREFILL], return_counts=True)[1]
        session = open_session(
            cell, geometry, lab.registry, dense_bytes=geometry.dense_bytes, observers=[audit],
            future=demands(trace, config) if subject.foresees else None, batch=config.workload.batch,
            context=int(trace.position.max()) + 1, longest_prompt=int(prompts.max()), equipment=equipment,
        )  # fmt: skip
        try:
            audit.attach(session)
            walk(trace, session.experts, config.workload.batch, config.chunk, equipment.acceptance, config.seed)
            audit.finish()
            return Run({}, audit, session, session.hooks.report())
        finally:
            session.close()


def replayed(lab: Lab, subject: Subject, trace: Trace) -> Run:
    """The plain replay of a recorded trace, made once."""
    plain = Arrangement("plain replay", clock="virtual")
    if (subject, plain) not in lab.kept:
        lab.kept[subject, plain] = replay(lab, subject, trace, Audit())
    return lab.kept[subject, plain]
