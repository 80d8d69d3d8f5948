"""What reading ahead is worth: SpecPrefetch's ladder of predictors, from none to one that knows the future.

    python benchmarks/specprefetch_ladder.py HW MODEL [KEY=VALUE ...]

HW is a machine that is modeled, MODEL tinymoe (live, held-out prompts) or a geometry (replay); words such as budget=0.1
or system.m=4 go to every mode that takes them.
"""

from __future__ import annotations

import sys

import moebench
from moebench.errors import UsageError

MODES = ("off", "pred0", "naive_prev_token", "gate_replay", "adapter", "oracle", "adversarial")
METRICS = ("decode_tok_s", "stall_ms_per_token", "hit_rate", "late_rate", "ssd_mib_per_token", "reads_per_token")
COUNTS = ("issued", "useful", "late", "cancelled", "wasted", "ready_recall", "window_holds")


def main(hw: str, model: str, words: list[str]) -> None:
    """One line per mode; what a mode predicts how well stands at its end."""
    options = dict(word.split("=", 1) for word in words)
    print("mode " + " ".join((*METRICS, *COUNTS)) + " recall@K/2,K,K+2 exact")
    for mode in MODES:
        try:
            row = run(hw, model, mode, options)
        except UsageError:  # an option of other modes
            row = run(hw, model, mode, {k: v for k, v in options.items() if not k.startswith("system.")})
        counts = row.protocol["counters"]
        values = [row.metrics[name].value for name in METRICS] + [counts.get(name) for name in COUNTS]
        recall = [f"{v:.3f}" for name, v in counts.items() if name.startswith("recall_at") or name == "exact_set"]
        print(mode, *("-" if v is None else f"{v:.4g}" for v in values), *recall, flush=True)
    for line in row.assumptions:
        print(line)


def run(hw: str, model: str, mode: str, options: dict[str, str]):
    """The row of one mode; published figures may follow it."""
    more = {"quality": "none", **options}
    row, *_ = moebench.run(system="specprefetch", hw=hw, model=model, **{"system.mode": mode}, **more)
    return row


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
