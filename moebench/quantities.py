"""Numbers that a published claim may be about, taken from one row: its metrics, counters, and what follows from them.

Knows rows; knows no claim, no machine and no system. A number that a row does not have is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moebench.errors import unknown
from moebench.result import Row
from moebench.units import GB, GIB, MIB

FAMILIES = ("time", "traffic", "memory", "quality")
COUNTER = "counter."  # a number that the system counted
MS_PER_TOKEN = {"token_ms": 1.0, "token_s": 1e3}  # milliseconds per token of one unit
DERIVED = {  # quantities beside the metrics of a row: name -> (family, what it is)
    "token_ms": ("time", "1000 / decode_tok_s"),
    "token_s": ("time", "1 / decode_tok_s"),
    "prefill_tok_s": ("time", "prompt tokens / time to first token"),
    "blocked_share": ("time", "share of a decode step that is waiting, or a load's cost for the host, in percent"),
    "load_share": ("time", "share of a decode step spent waiting for storage, link and decoder, in percent"),
    "waiting_gib_s": ("time", "bytes read / time the loop waited for storage, link and decoder"),
    "blocked_ms": ("time", "stall and what loads cost the host, ms a token"),
    "hit_percent": ("traffic", "100 x hit rate"),
    "ready_percent": ("traffic", "demanded experts that were complete when their layer came, in percent"),
    "read_gb_per_token": ("traffic", "GB that storage delivered / tokens emitted"),
    "refetch_percent": ("traffic", "evictions whose expert was wanted again within 5 steps, in percent"),
    "rejected_percent": ("traffic", "verified rows that were not accepted, in percent"),
    "relocated_percent": ("traffic", "bytes written to move experts / bytes read, in percent"),
    "demanded_per_token": ("traffic", "distinct experts that windows demanded / tokens emitted"),
    "better_percent": ("traffic", "decisions in which this policy's victim is used later than the rival's, in percent"),
    "differs_percent": ("traffic", "decisions in which the two policies name victims with other next uses, in percent"),
    "misses": ("traffic", "experts that had to be read"),
    "overlap_percent": ("traffic", "experts of a layer that the token before used too, in percent"),
    "touched_percent": ("traffic", "experts of a layer that a prompt uses, in percent"),
    "touched_mb": ("traffic", "bytes of all experts that a token uses, in MB"),
    "touched_gb": ("traffic", "bytes of all experts that a token uses, in GB"),
    "expert_mib": ("memory", "bytes of one expert, in MiB"),
    "routed_gib": ("memory", "bytes of all routed experts, in GiB"),
    "read_gb_total": ("traffic", "bytes of a stated number of reads of one expert, in GB"),
    "routed_ffn_percent": ("time", "routed experts' share of the feed-forward arithmetic of a token, in percent"),
    "coded_saving_percent": ("traffic", "bytes that rANS saves of an expert of Gaussian weights, in percent"),
}
METRIC_FAMILIES = {
    "decode_tok_s": "time",
    "ttft_s": "time",
    "tpot_p50_ms": "time",
    "tpot_p95_ms": "time",
    "tpot_p99_ms": "time",
    "stall_ms_per_token": "time",
    "effective_gb_s": "time",
    "peak_active_gib": "memory",
    "allocator_peak_gib": "memory",
    "process_peak_gib": "memory",
    "hit_rate": "traffic",
    "ssd_mib_per_token": "traffic",
    "reads_per_token": "traffic",
    "storage_requests_per_token": "traffic",
    "verified_per_token": "traffic",
    "accepted_per_round": "traffic",
    "quality_delta": "quality",
}


@dataclass(frozen=True)
class Found:
    """What became of an arm of a claim: its numbers, or the one line that says why there are none; a cell's row too."""

    numbers: Mapping[str, float]
    error: str = ""
    row: Row | None = None


def family(name: str) -> str:
    """Which family a quantity belongs to; an unknown one lists those that there are."""
    if name in METRIC_FAMILIES:
        return METRIC_FAMILIES[name]
    if name in DERIVED:
        return DERIVED[name][0]
    if name.startswith(COUNTER):
        return "traffic"
    raise unknown("quantity", name, (*METRIC_FAMILIES, *DERIVED), f"; or {COUNTER}NAME")


def per_token_ms(name: str, value: float) -> float:
    """Milliseconds per token that a rate or a time says."""
    return 1e3 / value if name == "decode_tok_s" else MS_PER_TOKEN[name] * value


def of_row(row: Row) -> dict[str, float]:
    """All quantities of a row, the parts of its time (``split.NAME``) and of its memory among them."""
    found = {name: m.value for name, m in row.metrics.items() if m.value is not None}
    counters: Mapping[str, float] = row.protocol.get("counters", {})
    found |= {COUNTER + name: float(value) for name, value in counters.items() if isinstance(value, int | float)}
    split = row.details.get("split_ms_per_token", {})
    found |= {f"split.{name}": float(ms) for name, ms in split.items()}
    waited = sum(split.get(name, 0.0) for name in ("stall", "copy", "decode"))
    mib = found.get("ssd_mib_per_token")
    pairs = {
        "token_ms": _over(1, found.get("decode_tok_s"), 1e3),
        "token_s": _over(1, found.get("decode_tok_s")),
        "prefill_tok_s": _over(row.config.get("workload", {}).get("prompt_tokens"), found.get("ttft_s")),
        "load_share": _over(waited, sum(split.values()), 100),
        "waiting_gib_s": _over(mib, waited, MIB / GIB * 1e3),
        "hit_percent": _over(found.get("hit_rate"), 1, 100),
        "ready_percent": _over(counters.get("ready_recall"), 1, 100),
        "read_gb_per_token": _over(mib, GB, MIB),
        "refetch_percent": _over(counters.get("refetched_within_5"), counters.get("evictions"), 100),
        "rejected_percent": _rejected(counters),
        "relocated_percent": _over(counters.get("relocated_mib_per_token"), mib, 100),
        "demanded_per_token": _over(counters.get("demanded"), counters.get("emitted")),
    }
    return found | {name: value for name, value in pairs.items() if value is not None}


def _rejected(counters: Mapping[str, float]) -> float | None:
    """Of the rows that were verified, those that gave no token."""
    kept = _over(counters.get("emitted"), counters.get("rows"))
    return None if kept is None else 100 * (1 - kept)


def _over(part: float | None, whole: float | None, times: float = 1) -> float | None:
    return times * part / whole if part is not None and whole else None
