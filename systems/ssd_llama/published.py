"""Figures that the paper published for its desktop, where a machine and a model here are those.

Its machine is ``rtx5090_ssd_llama``, with 32 GB ``rtx5090_ssd_llama_32gb``; ``rtx5090_32gb`` has the same card and a
faster drive. Two models have a speed; the numbers themselves, ratios and bandwidths stand in ``configs/claims``.
"""

from __future__ import annotations

from typing import Any

from moebench.systemspec import Published


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


def _kimi(hw: str) -> Published:
    setting = "32 GB of RAM; whether with rANS is not stated; batch 1, MMLU and Alpaca"
    return Published(hw, "kimi-k2.7-code", {"decode_tok_s": "ssd_llama_kimi_tok_s"}, setting, whole_system)


def _deepseek(hw: str) -> Published:
    setting = (
        "control of its placement experiment, all six experts on the card: 16,770 reads are 65 tokens of 43 layers "
        "with 6 each, so nothing was found in a cache; size of RAM not stated"
    )
    return Published(hw, "deepseek-v4-flash", {"decode_tok_s": "ssd_llama_deepseek_device_ms"}, setting, nothing_kept)


PUBLISHED = (
    *(_kimi(hw) for hw in ("rtx5090_32gb", "rtx5090_ssd_llama_32gb")),
    *(_deepseek(hw) for hw in ("rtx5090_32gb", "rtx5090_ssd_llama")),
)
