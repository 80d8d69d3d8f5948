"""Rows as a comparison leaves them, made by hand: several systems, budgets, a failure, details and quality."""

from __future__ import annotations

import math
from typing import Any

from moebench.result import METRICS, Metric, Row, metric

SYSTEMS = {
    "ondemand": ("floor", "exact", 4.0, 1.4),
    "lru": ("baseline", "exact", 14.0, 5.5),
    "slru": ("baseline", "exact", 15.0, 5.5),
    "edge0": ("system", "altered", 25.0, 5.7),
    "flashmoe": ("system", "exact", 17.0, 5.6),
    "belady": ("oracle", "exact", 18.0, 5.5),
    "resident": ("ceiling", "exact", 23.0, 18.2),
}
ROLES = {name: role for name, (role, *_) in SYSTEMS.items()}
HOSTILE = "<script>alert(1)</script>|`=1+1`\"'&"


def metrics(speed: float, memory: float, delta: float | None = None) -> dict[str, Metric]:
    """A full set, with reasons where nothing is told."""
    found = {name: metric(name, None, None, 0, f"not told: {name}") for name in METRICS}
    hits = min(0.99, speed / 25)
    told = {"decode_tok_s": speed, "peak_active_gib": memory, "hit_rate": hits, "ssd_mib_per_token": 400 / speed}
    found |= {name: metric(name, value, "modeled", 120) for name, value in told.items()}
    if delta is not None:
        found["quality_delta"] = metric("quality_delta", delta, "measured", 40, ci=(delta - 1.5, delta + 1.0))
    return found


def details(speed: float) -> dict[str, Any]:
    """120 steps whose time grows with their misses, shares that add up, two steps on a timeline."""
    misses = [(7 * at * at + at) % 11 % 7 for at in range(120)]
    stall = [round(1.3 * missed, 3) for missed in misses]
    ms = [round(1000 / speed + wait, 3) for wait in stall]
    events = [[0, f"layer {at}", 100.0 * at, 60.0] for at in range(20)]
    events += [[1, f"layer {at} expert {at % 3}", 100.0 * at + 40, 90.0] for at in range(20)]
    mean, wait = math.fsum(ms) / 120, math.fsum(stall) / 120
    return {
        "steps": {"ms": ms, "tokens": [1] * 120, "misses": misses, "stall_ms": stall},
        "split_ms_per_token": {
            "compute": mean - wait - 1, "stall": wait, "copy": 0.25, "decode": 0.25, "overhead": 0.5,
        },
        "timeline": {"lanes": ["compute", "storage"], "events": events, "steps": [[0.0, 1000.0], [1000.0, 1000.0]]},
    }  # fmt: skip


def row(system: str, budget: str = "0.25", model: str = "tinymoe", hw: str = "m4pro", **changes: Any) -> Row:
    """One row of a system; changes replace fields."""
    _, fidelity, speed, memory = SYSTEMS.get(system, ("system", "exact", 10.0, 5.0))
    share = float(budget) / 0.25
    live = model == "tinymoe"
    fields: dict[str, Any] = {
        "system": system, "fidelity": fidelity, "hw": hw, "model": model,
        "workload_name": "prompts" if live else "synthetic",
        "config": {
            "system": {"id": system}, "hw": hw, "model": model, "budget": budget, "quality": {"suite": "quick"},
            "workload": {"kind": "synthetic", "name": "synthetic"},
        },
        "environment": {"commit": "0123456789abcdef", "python": "3.11", "packages": {"numpy": "2.4"}},
        "workload": {"kind": "prompts" if live else "synthetic", "seed": 0, "hash": "ab12cd34ef56"},
        "protocol": {"clock": "virtual", "warmup_tokens": 16, "slots": {"device": 64}},
        "metrics": metrics(speed * share**0.2, memory * share, -3.9 * (fidelity == "altered") if live else None),
        "assumptions": ("assumed: something stated (arXiv 1234.5)",),
        "details": details(speed),
        "volatile": {"finished": "2026-11-30T00:00:00+00:00", "seconds": 1.5, "hook_us_per_token": 12.5},
    }  # fmt: skip
    return Row(**(fields | changes))


def failed(system: str = "lfu", error: str = "the disk is full", **changes: Any) -> Row:
    """A row that failed."""
    none = {name: metric(name, None, None, 0, "the run failed") for name in METRICS}
    gone = {"metrics": none, "details": {}, "status": "failed", "error": error}
    return row(system, **(gone | changes))


def published(system: str = "edge0") -> Row:
    """Figures of others beside it."""
    found = {name: metric(name, None, None, 0, "the publication does not report it") for name in METRICS}
    found["decode_tok_s"] = metric("decode_tok_s", 20.4, "published", source="arXiv 2609.18063, table 1")
    plain = {"kind": "published", "seed": 0, "hash": ""}
    return row(system, workload_name="published", config={}, environment={}, workload=plain, metrics=found, details={})


def comparison() -> list[Row]:
    """Two models on one machine, a sweep of budgets, a failure and a published row."""
    rows = [row(system) for system in SYSTEMS]
    rows += [row(system, budget) for system in ("lru", "belady", "flashmoe") for budget in ("0.05", "0.1", "0.5")]
    rows += [row(system, model="big-moe") for system in SYSTEMS]
    return [*rows, failed(), published()]
