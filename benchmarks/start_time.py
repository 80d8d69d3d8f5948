"""How long ``moebench --help`` and ``moebench list`` take, from a fresh process to its end. The bar is one second.

    python benchmarks/start_time.py [--rounds N]

The best round counts, since other programs can only slow one down. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

BAR_S = 1.0
COMMANDS = (("--help",), ("list",), ("list", "-v"))


def seconds(words: tuple[str, ...]) -> float:
    """Wall time of one command."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "moebench.cli", *words], check=True, capture_output=True)
    return time.perf_counter() - started


def main() -> None:
    """Measure each command and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    taken = {" ".join(words): min(seconds(words) for _ in range(rounds)) for words in COMMANDS}
    for name, value in taken.items():
        print(f"moebench {name:10s} {value:6.2f} s   {'ok' if value < BAR_S else 'above the bar'}")
    print(json.dumps({"rounds": rounds, "seconds": taken}, separators=(",", ":")))


if __name__ == "__main__":
    main()
