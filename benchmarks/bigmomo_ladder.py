"""What each part of BigMoMo is worth: from on-demand loading to all mechanisms, on a modeled machine.

    python benchmarks/bigmomo_ladder.py HW MODEL [KEY=VALUE ...]

MODEL is tinymoe (live, held-out prompts) or a geometry (replay). Words such as budget=0.19 or workload.requests=2 go to
every rung. ``on_demand``: one token a pass, its missing experts read one after the other, computed when all are there.
``speculative``: the same with drafts. ``window``: a window's reads are issued together, in order of place, and experts
are computed as they arrive. Each further rung adds one mechanism; the last one alters answers.
"""

from __future__ import annotations

import sys

import moebench
from moebench.errors import UsageError

SLOW = {"reads": "one", "schedule": "wait_all", "reorganise": False}
WINDOW = {"rho": 1.0, "gap": "none", "reorganise": False}
RUNGS = {
    "on_demand": {"draft": "none", **SLOW},
    "speculative": {"rho": 1.0, **SLOW},
    "window": {"schedule": "arrival", **WINDOW},
    "+ runs": {"schedule": "arrival", **WINDOW, "gap": "auto"},
    "+ stages": {**WINDOW, "gap": "auto"},
    "+ rho": {"gap": "auto", "reorganise": False},
    "+ places (exact)": {},
    "+ tau 0.05": {"tau": 0.05},
    "+ tau 0.2": {"tau": 0.2},
    "no draft": {"draft": "none"},
    "chain of 2": {"branching": 1, "rho": 1.0},
    "chain of 4": {"branching": 1, "rho": 1.0, "depth": 4},
    "D = B = 4": {"depth": 4, "branching": 4, "rho": 1.0},
}
METRICS = (
    "decode_tok_s", "stall_ms_per_token", "hit_rate", "reads_per_token", "storage_requests_per_token",
    "ssd_mib_per_token", "accepted_per_round", "verified_per_token", "token_agreement",
)  # fmt: skip
COUNTS = ("right_at_1", "right_at_2", "experts_dropped", "impact_dropped", "swaps", "relocated_mib_per_token")


def main(hw: str, model: str, words: list[str]) -> None:
    """One line per rung."""
    options = {"quality": "none", **dict(word.split("=", 1) for word in words)}
    print("rung | " + " ".join((*METRICS, *COUNTS)))
    for name, knobs in RUNGS.items():
        system = {f"system.{knob}": value for knob, value in knobs.items()}
        try:
            row, *_ = moebench.run(system="bigmomo", hw=hw, model=model, **system, **options)
        except UsageError as error:  # a tree where only chains can be verified
            print(name, "|", error, flush=True)
            continue
        if row.error:
            print(name, "|", row.error, flush=True)
            continue
        counts = row.protocol["counters"]
        values = [row.metrics[metric].value for metric in METRICS] + [counts.get(count) for count in COUNTS]
        print(name, "|", *("-" if value is None else f"{value:.4g}" for value in values), flush=True)
    for line in row.assumptions:
        print(line)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
