"""Figures that the paper published for its desktop, where a machine and a model here are those.

Its card and, for Kimi, its memory are those of ``rtx5090_32gb``; its drive is slower (at most 9 GiB/s). Two models have
a speed; ratios, bandwidths and contradictions stand in README.md.
"""

from __future__ import annotations

from typing import Any

from moebench.systemspec import Published

SOURCE = "arXiv 2609.18110, Core Ultra 5 230F, RTX 5090, NVMe drive of at most 9 GiB/s"


def reads_as_published(run: Any) -> bool:
    """Whether whole experts are read past the page cache, uncompressed, for one sequence."""
    reads = run.engine in ("auto", "direct", "uring") and (run.layout, run.codec) == ("packed", "none")
    return reads and run.quant == "int4" and run.workload.batch == 1


def whole_system(knobs: Any, run: Any) -> bool:
    """Whether a run has all that the paper has: three tiers of whole experts, everything computed on the device."""
    keeps = (knobs.tiers, knobs.granularity, knobs.placement) == ("three", "expert", "device") and knobs.temporary > 0
    return keeps and reads_as_published(run)


def nothing_kept(knobs: Any, run: Any) -> bool:
    """Whether each active expert is read for each token, as in the paper's placement experiment."""
    keeps = (knobs.tiers, knobs.granularity, knobs.placement) == ("two", "none", "device")
    return keeps and reads_as_published(run)


PUBLISHED = (
    Published(
        "rtx5090_32gb",
        "kimi-k2.7-code",
        {"decode_tok_s": (1.03, SOURCE)},
        "32 GB of RAM; whether with rANS is not stated; batch 1, MMLU and Alpaca",
        whole_system,
    ),
    Published(
        "rtx5090_32gb",
        "deepseek-v4-flash",
        {"decode_tok_s": (1 / 0.51395, f"{SOURCE}: 513.95 ms per token")},
        "control of its placement experiment, all six experts on the card: 16,770 reads are 65 tokens of 43 layers "
        "with 6 each, so nothing was found in a cache; size of RAM not stated",
        nothing_kept,
    ),
)
