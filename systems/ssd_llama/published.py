"""Figures that the paper published for its desktop, where a machine and a model here are those.

Its card and, for Kimi, its memory are those of ``rtx5090_32gb``; its drive is slower (at most 9 GiB/s). Two models have
a speed; ratios, bandwidths and contradictions stand in README.md.
"""

from __future__ import annotations

from typing import Any

from moebench.systemspec import Published

SOURCE = "arXiv 2609.18110, Core Ultra 5 230F, RTX 5090, NVMe drive of at most 9 GiB/s"


def as_published(knobs: Any, run: Any) -> bool:
    """Whether a run has the paper's way throughout: whole experts, three tiers, everything computed on the device."""
    reads = run.engine in ("auto", "direct", "uring") and (run.layout, run.codec) == ("packed", "none")
    keeps = (knobs.tiers, knobs.granularity, knobs.placement) == ("three", "expert", "device") and knobs.temporary > 0
    return reads and keeps and run.quant == "int4" and run.workload.batch == 1


PUBLISHED = (
    Published(
        "rtx5090_32gb",
        "kimi-k2.7-code",
        {"decode_tok_s": (1.03, SOURCE)},
        "32 GB of RAM; whether with rANS is not stated; batch 1, MMLU and Alpaca",
        as_published,
    ),
    Published(
        "rtx5090_32gb",
        "deepseek-v4-flash",
        {"decode_tok_s": (1 / 0.51395, f"{SOURCE}: 513.95 ms per token")},
        "control of its placement experiment, all six experts on the card; size of RAM not stated (16 GB elsewhere)",
        as_published,
    ),
)
