"""What dropping experts of a window costs in answers: tinymoe's tasks under BigMoMo by tau, one sequence at a time.

    python benchmarks/bigmomo_quality.py [ITEMS] [KEY=VALUE ...]

ITEMS a task (10). Exact match, paired item by item with the unmodified model (16 bits, experts resident), and the share
of its tokens that are still the greedy choice. tau=0 shows what int4 alone does.
"""

from __future__ import annotations

import sys

import moebench

TAUS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4)
HW = "snapdragon_8_elite_gen5"


def main(items: int, words: list[str]) -> None:
    """One line per tau."""
    # a window of twenty sequences drops other experts than a window of one
    options = {"hw": HW, "model": "tinymoe", "budget": "0.26", "quality.limit": items, "quality.batch": 1}
    options |= dict(word.split("=", 1) for word in words)
    print("tau | dropped/(row, layer) impact demanded/row reads/token tok/s | delta points, interval, n | agreement, n")
    for tau in TAUS:
        row, *_ = moebench.run(system="bigmomo", **{"system.tau": tau, "system.reorganise": False, **options})
        if row.error:
            raise SystemExit(row.error)
        counts, metrics = row.protocol["counters"], row.metrics
        dropped = counts.get("experts_dropped", 0) / counts["rows"] / 8
        delta, agreement = metrics["quality_delta"], metrics["token_agreement"]
        demanded = counts["demanded"] / counts["rows"] / 8
        print(f"{tau} | {dropped:.2f} {counts.get('impact_dropped', 0):.3f} {demanded:.2f}"
              f" {metrics['reads_per_token'].value:.1f} {metrics['decode_tok_s'].value:.1f} | {delta.value:.1f}"
              f" {delta.ci} {delta.n} | {agreement.value:.4f} {agreement.n}", flush=True)  # fmt: skip


if __name__ == "__main__":
    given = [word for word in sys.argv[1:] if "=" not in word]
    main(int(given[0]) if given else 10, [word for word in sys.argv[1:] if "=" in word])
