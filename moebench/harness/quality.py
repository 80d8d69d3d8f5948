"""What a system costs in answers: a suite asked under the system and under the unmodified model, item by item.

Opens sessions on the live model; knows no task.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moebench.config import RunConfig
from moebench.engine.loop import Loop
from moebench.harness.assets import LiveModel
from moebench.harness.passes import Sessions
from moebench.harness.plan import Cell
from moebench.harness.session import Session
from moebench.plugins import Registry
from moebench.quality import parity, reference
from moebench.quality.batches import TOKENS
from moebench.quality.members import members
from moebench.quality.native import CHUNK, Native
from moebench.quality.parity import P99_MINIMUM, Parity
from moebench.quality.scores import REFERENCE, TaskScores, compare_tasks, mean_delta
from moebench.quality.suites import Suite, open_suite
from moebench.result import Metric, metric
from moebench.systemspec import Equipment

METRICS = ("token_agreement", "kl_median_nats", "kl_p99_nats", "perplexity", "quality_delta")


@dataclass(frozen=True)
class Asked:
    """A cell with its live model, ready to answer."""

    cell: Cell
    registry: Registry
    model: LiveModel
    backend: Any
    equipment: Equipment


def suite_for(config: RunConfig, model: LiveModel) -> Suite | None:
    """The suite of a run on this model, None for none; what it cannot ask is one line before anything runs."""
    return open_suite(config.quality, model.tokenizer, model.ends, model.positions, model.geometry.vocabulary)


def unasked(reason: str) -> dict[str, Metric]:
    """The metrics of a run in which nothing was asked."""
    return {name: metric(name, None, None, 0, reason) for name in METRICS}


def ask(suite: Suite, asked: Asked, progress: Callable[[str], None]) -> tuple[dict[str, Metric], dict[str, Any]]:
    """Metrics, and the block ``quality`` of a row, of a suite under a system beside the unmodified model."""
    progress(f"quality={suite.name} under the unmodified model")
    model = asked.model.pack.manifest.model
    native = reference.answers(asked.model.folder, {name: model[name] for name in ("weights_hash", "config")}, suite)
    progress(f"quality={suite.name} under {asked.cell.spec.id}")
    tasks, likeness = _under_system(suite, asked, native)
    block = {
        "suite": suite.name,
        "harness": suite.harness,
        "reference": REFERENCE,
        "tasks": compare_tasks(tasks, native.tasks),
        "text": likeness.block(),
    }
    return _metrics(suite.name, tasks, native.tasks, likeness), block


def _under_system(suite: Suite, asked: Asked, native: Native) -> tuple[dict[str, TaskScores], Parity]:
    """All answers and predictions of the system, in one session with its cache as it comes."""
    cell = asked.cell
    decoded = cell.spec.fidelity(cell.config.knobs) == "altered"
    found: list[tuple[dict[str, TaskScores], Parity]] = []

    def work(session: Session) -> None:
        loop = Loop(asked.backend, session.experts, CHUNK)
        tasks = suite.run(loop, decoded)
        likeness = parity.compare(loop, suite.text(), native.text, suite.vocabulary, suite.batch)
        found[:] = [(tasks, likeness)]

    room = min(suite.longest, max(TOKENS, suite.longest) // suite.batch)
    sizes = (room, 0, suite.batch)
    with Sessions(cell, asked.registry, asked.model, asked.backend, asked.equipment, *sizes) as fresh:
        work(fresh(work))
    return found[0]


def _metrics(
    suite: str, system: dict[str, TaskScores], native: dict[str, TaskScores], likeness: Parity
) -> dict[str, Metric]:
    few = f"p99 needs {P99_MINIMUM} tokens, the text had {likeness.tokens}"
    values = {
        "token_agreement": likeness.agreement,
        "kl_median_nats": likeness.kl_median,
        "kl_p99_nats": likeness.kl_p99,
        "perplexity": likeness.perplexity,
    }
    found = {
        name: metric(name, value, "measured", likeness.tokens, few * (value is None)) for name, value in values.items()
    }
    delta = mean_delta(system, native, members(suite, system))
    if delta is None:
        found["quality_delta"] = metric("quality_delta", None, None, 0, "no task of the suite is scored in points")
    else:
        found["quality_delta"] = metric("quality_delta", delta[0], "measured", delta[2], ci=delta[1])
    return found
