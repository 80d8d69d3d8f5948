"""Rows with a quality block made by hand: five tasks of a few items, answered right or wrong as asked."""

from __future__ import annotations

from test_result_files import make_row

from moebench.quality.paired import exact_p, paired_delta
from moebench.result import Row, metric

TASKS = ("chain", "recall", "lists", "program", "world")


def task(scores, reference, version: str = "abc123", mode: str = "gen") -> dict:
    """One task's entry, as a run writes it; scores are 0 or 1 an item."""
    delta = paired_delta(scores, reference, ["t"] * len(scores))
    gained = sum(a > b for a, b in zip(scores, reference, strict=True))
    lost = sum(a < b for a, b in zip(scores, reference, strict=True))
    return {
        "version": version, "metric": "exact_match", "mode": mode, "n": len(scores),
        "value": 100 * sum(scores) / len(scores), "reference": 100 * sum(reference) / len(reference),
        "delta": delta.points, "ci": list(delta.ci), "p": exact_p(gained, lost), "gained": gained, "lost": lost,
        "scores": [100.0 * s for s in scores], "reference_scores": [100.0 * s for s in reference],
    }  # fmt: skip


def answered(system: str = "lru", wrong: int = 0, items: int = 4, suite: str = "local", **changes) -> Row:
    """A row that got the first ``wrong`` items of every task wrong; the unmodified model had the last one wrong."""
    scores = [0.0] * wrong + [1.0] * (items - wrong)
    reference = [1.0] * (items - 1) + [0.0]
    tasks = changes.pop("tasks", None) or {name: task(scores, reference) for name in TASKS}
    quality = {"suite": suite, "harness": "moebench", "reference": "unmodified bf16", "tasks": tasks}
    changes.setdefault("config", {"budget": "0.25", "quant": "int4", "system": {"id": system}})
    changes.setdefault("metrics", {"token_agreement": metric("token_agreement", 0.5, "measured")})
    return make_row(system=system, quality=quality, **changes)
