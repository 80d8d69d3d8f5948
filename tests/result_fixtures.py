"""Rows made up for tests of what reads, judges and draws them."""

from __future__ import annotations

from typing import Any

from moebench.result import METRICS, Metric, Row, metric

HERE = {"cpu": "made-up cpu", "isa": "avx2", "gpu": None, "ram_gib": 15.9, "python": "3.11", "packages": {"torch": "2"}}


def modeled(**values: float | None) -> dict[str, Metric]:
    """Metrics of a modeled row; None has a reason."""
    return {name: metric(name, value, "modeled", reason="not made up") for name, value in values.items()}


def measured(**samples: list[float]) -> dict[str, Metric]:
    """Metrics of a measured row, each by the values of its repeats."""
    return {
        name: metric(name, sorted(found)[len(found) // 2], "measured", len(found), samples=found)
        for name, found in samples.items()
    }


def answered(name: str, value: float, n: int, ci: tuple[float, float] | None = None) -> dict[str, Metric]:
    """A metric that a model's answers gave."""
    return {name: metric(name, value, "measured", n, ci=ci)}


def make_row(metrics: dict[str, Metric] | None = None, **changes: Any) -> Row:
    """One row of a cell; ``commit`` and ``finished`` are shortcuts, ``clock`` is virtual unless said otherwise."""
    environment = {**HERE, "commit": changes.pop("commit", "c0"), **changes.pop("environment", {})}
    options = {"budget": "0.25", "system": {"id": changes.get("system", "lru")}, "workload": {"path": "here"}}
    protocol = {"clock": changes.pop("clock", "virtual"), "warmup_tokens": 16, "page_cache": "none", "profile": "p0"}
    plain = {
        "system": "lru",
        "fidelity": "exact",
        "hw": "m4pro",
        "model": "tinymoe",
        "workload_name": "synthetic",
        "config": {**options, **changes.pop("options", {})},
        "environment": environment,
        "workload": {"kind": "synthetic", "seed": 0, "hash": "ab"},
        "protocol": {**protocol, **changes.pop("protocol", {})},
        "metrics": modeled(decode_tok_s=20.0, hit_rate=0.5) if metrics is None else metrics,
        "volatile": {"finished": changes.pop("finished", "2026-01-01T00:00:00+00:00")},
    }
    return Row(**{**plain, **changes})


def failed_row(**changes: Any) -> Row:
    """A row of a run that failed: every metric without a value, and the error."""
    gone = {name: metric(name, None, None, 0, "the run failed") for name in METRICS}
    return make_row(gone, status="failed", error=changes.pop("error", "out of memory"), **changes)
