"""What a verification window loads, by its size and by how often guesses hold: BigMoMo on routing traces.

    python benchmarks/bigmomo_windows.py MODEL [TRACE] [KEY=VALUE ...]

MODEL is a geometry; without TRACE (a file of 'moebench trace') routing is synthetic. Chains of W - 1 guesses, so
windows of W rows. Loads per layer without a cache are the window's distinct experts; with one (budget=0.25) what is
read. Beside them the union under independence, E (1 - (1 - k/E)^W).
"""

from __future__ import annotations

import sys

import moebench
from moebench.geometry import load
from moebench.plugins import load_plugins

HW = "snapdragon_8_elite_gen5"
WINDOWS = (1, 2, 3, 4, 5, 6, 8)
CHANCES = (0.3, 0.5, 0.7, 0.9)


def main(model: str, words: list[str]) -> None:
    """A table of unions, then one of loads per accepted token for each chance."""
    options = dict(word.split("=", 1) for word in words if "=" in word)
    trace = next((word for word in words if "=" not in word), "")
    geometry = load(load_plugins().model_path(model))
    if trace:
        options |= {"workload": "trace", "workload.path": trace, "workload.name": "trace"}
    else:
        options = {"workload.requests": 2, "workload.new_tokens": 96, **options}
    print(
        "chance window | per layer and verified row: demanded read | per accepted token: demanded read | accepted/round"
    )
    for chance in CHANCES:
        for window in WINDOWS:
            counts = run(model, window, chance, options)
            rows, tokens = (counts[name] * geometry.layers for name in ("rows", "emitted"))
            shares = [counts[name] / of for of in (rows, tokens) for name in ("demanded", "read")]
            print(f"{chance} {window} | {shares[0]:.2f} {shares[1]:.2f} | {shares[2]:.2f} {shares[3]:.2f} |"
                  f" {counts['emitted'] / max(1, counts['passes']):.2f}", flush=True)  # fmt: skip
    experts, k = geometry.experts, geometry.top_k
    unions = [experts * (1 - (1 - k / experts) ** w) / w for w in WINDOWS]
    print("independent rows, demanded per row:", *(f"{u:.2f}" for u in unions))


def run(model: str, window: int, chance: float, options: dict) -> dict[str, float]:
    """Counters of one run; a window of one row is plain decoding."""
    drafts = {"system.depth": window - 1, "system.branching": 1, "system.acceptance": chance, "system.rho": 1.0}
    knobs = drafts if window > 1 else {"system.draft": "none"}
    still = {"system.reorganise": False, "quality": "none", "hw": HW}
    row, *_ = moebench.run(system="bigmomo", model=model, **{**still, **knobs, **options})
    if row.error:
        raise SystemExit(row.error)
    counts = row.protocol["counters"]
    return counts


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
