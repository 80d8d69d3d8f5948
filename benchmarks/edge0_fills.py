"""Edge0 off and on, by fill mode, K and budget, in replay: the first table of docs/systems.md.

    python benchmarks/edge0_fills.py [MODEL [MACHINE ...]]

Modeled on m4pro and m2_16gb, qwen3.6-35b-a3b, unless told otherwise.
"""

from __future__ import annotations

import sys

import moebench
from moebench.errors import UsageError

ARMS = {
    "off": {"system.prerouter": False},
    **{fill: {"system.fill": fill} for fill in ("staged_sync", "overlap", "eager")},
}
COLUMNS = ("decode_tok_s", "stall_ms_per_token", "ssd_mib_per_token", "hit_rate", "late_rate", "peak_active_gib")


def main(model: str, machines: list[str]) -> None:
    """Print one line per machine, budget, K and arm; what a budget cannot hold says so."""
    print("machine budget K arm " + " ".join(COLUMNS))
    for hw in machines:
        for budget in ("0.25", "0.02"):
            for k in (2, 4, 8):
                for name, knobs in ARMS.items():
                    options = {"hw": hw, "model": model, "budget": budget, "quality": "none", "system.k": k, **knobs}
                    try:
                        metrics = moebench.run(system="edge0", **options)[0].metrics
                    except UsageError as error:
                        print(hw, budget, k, name, error)
                        continue
                    print(hw, budget, k, name, *(f"{metrics[column].value:.3g}" for column in COLUMNS), flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "qwen3.6-35b-a3b", sys.argv[2:] or ["m4pro", "m2_16gb"])
