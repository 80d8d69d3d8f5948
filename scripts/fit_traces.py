"""Finds the parameters of synthetic routing that match the statistics in configs/traces/MODEL.yaml; writes them there.

    python scripts/fit_traces.py [--evaluations N] [--seed N] [--measure FOLDER] MODEL ...
    python scripts/fit_traces.py --table                # docs/traces.md anew, from the files

The file says what is matched, on traces of which shape, what may change (``free``) and where the search starts: at
``START`` or at another geometry's fit. An evolution strategy with one parent: a few parameters are moved at
a time, by steps that grow with success and shrink without. Same arguments, same result, on every machine. The loss is
the mean square of (statistic - value) / tolerance. --measure takes the values of a measured fit anew from a recording.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, replace
from pathlib import Path

import yaml

from moebench.residency.targets import Measures
from moebench.trace import fits
from moebench.trace.draws import Draws
from moebench.trace.importers import import_npz
from moebench.trace.synthetic import synthesize

BOUNDS = {
    "skew": (0.0, 4.0),
    "skew_spread": (0.0, 1.0),
    "shift": (0.0, 1.0),
    "reach": (0.05, 1.0),
    "persistence": (0.0, 0.9),
    "memory": (1, 32),
    "topics": (1, 64),
    "topics_per_sequence": (1, 8),
    "topic_rate": (0.0, 0.2),
    "topic_share": (0.0, 1.0),
    "layer_link": (0.0, 1.0),
}
START: dict[str, float] = {
    "skew": 1.2,
    "skew_spread": 0.7,
    "shift": 0.0,
    "reach": 0.35,
    "persistence": 0.28,
    "memory": 4,
    "topics": 16,
    "topics_per_sequence": 2,
    "topic_rate": 0.01,
    "topic_share": 0.8,
    "layer_link": 0.75,
}
DOCS = Path(__file__).parents[1] / "docs" / "traces.md"
MARKS = ("<!-- fits: written by scripts/fit_traces.py --table -->", "<!-- end of fits -->")
RATIO = ("memory", "topics", "topics_per_sequence", "shift", "topic_rate")  # moved by factors


def reached(fit: fits.Fit) -> dict[str, float]:
    """The statistics of a trace of this fit, by name."""
    measure = Measures(synthesize(fit.spec()))
    return {target.statistic: measure(target.statistic) for target in fit.targets}


def loss(fit: fits.Fit, found: dict[str, float]) -> float:
    """Mean square of misses in units of their tolerance."""
    return sum(((found[t.statistic] - t.value) / t.tolerance) ** 2 for t in fit.targets) / max(1, len(fit.targets))


def start(fit: fits.Fit) -> dict[str, float]:
    """Where the search begins."""
    if fit.start:
        return dict(fits.of_model(fit.start).parameters)
    return dict(START)


class Chance:
    """Numbers that are the same under every numpy."""

    def __init__(self, seed: int) -> None:
        self.draws = Draws(seed)

    def unit(self) -> float:
        """In 0..1."""
        return float(self.draws.below(1 << 24, 1)[0]) / (1 << 24)

    def bell(self) -> float:
        """About normal, by twelve uniform draws."""
        return sum(self.unit() for _ in range(12)) - 6.0


def moved(parameters: dict[str, float], free: tuple[str, ...], step: float, chance: Chance) -> dict[str, float]:
    """Other parameters near by: one to three of the free ones changed."""
    new = dict(parameters)
    for _ in range(1 + int(3 * chance.unit())):
        name = free[int(len(free) * chance.unit())]
        low, high = BOUNDS[name]
        if name in RATIO:
            value = (new[name] + 0.02 * high * (new[name] == 0)) * 2.0 ** (4 * step * chance.bell())
        else:
            value = new[name] + step * (high - low) * chance.bell()
        if isinstance(low, int):
            value += chance.bell() / 2
        value = min(max(value, low), high)
        new[name] = round(value) if isinstance(low, int) else round(value, 4)
    return new


def search(fit: fits.Fit, evaluations: int, seed: int) -> fits.Fit:
    """The best fit that was found, with what it reaches."""
    chance, step = Chance(seed), 0.15
    best = replace(fit, parameters=start(fit))
    found = reached(best)
    least = loss(fit, found)
    for count in range(evaluations if fit.free and fit.targets else 0):
        try:
            other = replace(best, parameters=moved(best.parameters, fit.free, step, chance))
            values = reached(other)
        except ValueError:  # no such trace: fewer experts in reach than a token takes
            continue
        miss = loss(fit, values)
        if miss < least:
            best, found, least, step = other, values, miss, min(0.3, 1.4 * step)
            print(f"{fit.model} {count}: {least:.4f} {best.parameters}", file=sys.stderr, flush=True)
        else:
            step = max(0.005, 0.96 * step)
    targets = tuple(replace(target, reached=round(found[target.statistic], 4)) for target in fit.targets)
    return replace(best, targets=targets, evaluations=evaluations if fit.free and fit.targets else 0)


def remeasured(fit: fits.Fit, recordings: Path) -> fits.Fit:
    """Targets of a measured fit with the values of the recording."""
    measure = Measures(import_npz(recordings / fit.model))
    return replace(fit, targets=tuple(replace(t, value=round(measure(t.statistic), 4)) for t in fit.targets))


def write(fit: fits.Fit) -> None:
    """The parameter file, fields in the order of the dataclass."""
    data = {name: value for name, value in asdict(fit).items() if value not in ("", (), 0)}
    data["targets"] = {t.pop("statistic"): t for t in map(asdict, fit.targets)}
    data |= {name: list(data[name]) for name in ("free", "left_out") if name in data}
    text = yaml.safe_dump(data, sort_keys=False, width=118, allow_unicode=True)
    (fits.folder() / f"{fit.model}.yaml").write_text(text)


def table() -> None:
    """Write what all files say into docs/traces.md, between its two marks."""
    lines = []
    for name in fits.names():
        fit = fits.load(fits.folder() / f"{name}.yaml")
        basis = f"borrowed from {fit.borrowed_from}" if fit.borrowed_from else fit.basis
        lines += [f"### {name}", "", f"Basis: {basis}. {fit.note}"]
        lines += [f"Left out: {text}." for text in fit.left_out]
        if fit.targets:
            lines += ["", "| statistic | target | tolerance | reached | source |", "|---|---|---|---|---|"]
        lines += [
            f"| `{t.statistic}` | {t.value:g} | {t.tolerance:g} | {t.reached:g} | {t.source} |" for t in fit.targets
        ]
        lines.append("")
    page = DOCS.read_text()
    begin, end = page.index(MARKS[0]) + len(MARKS[0]), page.index(MARKS[1])
    DOCS.write_text(page[:begin] + "\n\n" + "\n".join(lines) + "\n" + page[end:])


def main() -> None:
    """Fit each model named and print what was reached."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--evaluations", type=int, default=0, help="as many as the file says where none is given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--measure", type=Path, help="folder of recordings: takes the values of measured fits anew")
    parser.add_argument("--table", action="store_true", help="write the table in docs/traces.md from the files")
    arguments = parser.parse_args()
    if arguments.table:
        table()
    for model in arguments.models:
        fit = fits.load(fits.folder() / f"{model}.yaml")
        if arguments.measure and fit.basis == "measured":
            fit = remeasured(fit, arguments.measure)
        fit = search(fit, arguments.evaluations or fit.evaluations or 300, arguments.seed)
        write(fit)
        print(model, {name: fit.parameters[name] for name in fits.LAWS})
        for target in fit.targets:
            miss = (target.reached - target.value) / target.tolerance
            print(f"  {target.statistic:24}{target.value:9.3f}{target.reached:9.3f}{miss:7.2f} tolerances")


if __name__ == "__main__":
    main()
