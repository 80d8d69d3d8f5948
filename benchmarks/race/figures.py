"""The arithmetic of the race: busy time, the limit of a whole-expert cache, medians over rounds, bars, and the table.

Pure: records in, numbers and text out. A record is what an arm said, with its round, law, limit and arm.
"""

from __future__ import annotations

import statistics
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

GB = 1e9
Record = Mapping[str, Any]


def busy_s(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds covered by at least one of the spans (start, end)."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def lru_misses(demands: Sequence[Sequence[int]], slots: int, first: int) -> int:
    """Keys missed from demand number ``first`` on by an LRU of whole experts with ``slots`` slots, empty at start.

    What a demand needs does not leave for it, so a demand must fit.
    """
    held: OrderedDict[int, None] = OrderedDict()
    missed = 0
    for number, keys in enumerate(demands):
        if len(keys) > slots:
            raise ValueError(f"a demand of {len(keys)} experts does not fit {slots} slots")
        fresh = [key for key in keys if key not in held]
        for key in keys:
            if key in held:
                held.move_to_end(key)
        while len(held) + len(fresh) > slots:
            held.popitem(last=False)
        held.update(dict.fromkeys(fresh))
        missed += len(fresh) * (number >= first)
    return missed


def beside(fio: Sequence[Mapping[str, float]]) -> tuple[str, float]:
    """The best setting of fio and its GB/s over passes taken before and after an arm: the mean of each setting's."""
    means = {name: statistics.mean(run[name] for run in fio) for name in fio[0]}
    best = max(means, key=means.__getitem__)
    return best, means[best]


def with_disk(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Records with fio's best setting beside each, and its GB/s."""
    found = []
    for record in records:
        setting, rate = beside(record["fio"])
        found.append({**record, "fio_setting": setting, "fio_gb_s": rate})
    return found


def limit_tok_s(record: Record) -> float:
    """Tokens a second of a loop that does nothing but read what a whole-expert LRU of the same slots misses, at fio's
    rate beside it.
    """
    return record["fio_gb_s"] * GB / (record["lru_mb_token"] * 1e6)


def read_share(record: Record) -> float:
    """GB/s while reads were in flight, over fio's best beside it."""
    return record["mb_token"] * 1e6 / record["busy_s_token"] / GB / record["fio_gb_s"]


@dataclass(frozen=True)
class Bar:
    """A promise: ``value`` of the records of one round, law and limit by arm, held to ``least`` or ``most``."""

    name: str
    value: Callable[[Mapping[str, Record]], float]
    least: float | None = None
    most: float | None = None

    def holds(self, found: float) -> bool:
        """Whether a value keeps the promise."""
        return (self.least is None or found >= self.least) and (self.most is None or found <= self.most)

    @property
    def words(self) -> str:
        """The promise in words."""
        return f">= {self.least:g}" if self.least is not None else f"<= {self.most:g}"


BARS = (
    Bar("read rate over fio's best", lambda arm: read_share(arm["ssd_llama"]), least=0.9),
    Bar("tok/s over llama.cpp's", lambda arm: arm["ssd_llama"]["tok_s"] / arm["llama.cpp"]["tok_s"], least=2),
    Bar("tok/s over the LRU limit", lambda arm: arm["ssd_llama"]["tok_s"] / limit_tok_s(arm["ssd_llama"]), least=0.8),
    Bar("tok/s over accelerate's", lambda arm: arm["ssd_llama"]["tok_s"] / arm["accelerate"]["tok_s"], least=10),
    Bar("loop's own share of a step", lambda arm: arm["ssd_llama"]["overhead_share"], most=0.05),
    Bar("requests an expert, packed", lambda arm: _an_expert(arm["ssd_llama"]), most=1),
)
PACKED_GAIN = "tok/s, packed over checkpoint"


def _an_expert(record: Record) -> float:
    return record["requests_token"] / record["reads_token"]


def by_cell(records: Iterable[Record]) -> dict[tuple[str, str], list[dict[str, Record]]]:
    """Rounds of each (law, limit): arm to record, failed arms left out."""
    found: dict[tuple[str, str], dict[int, dict[str, Record]]] = {}
    for record in records:
        of = found.setdefault((record["law"], record["limit"]), {}).setdefault(record["round"], {})
        if "error" not in record:
            of[record["arm"]] = record
    return {cell: [rounds[number] for number in sorted(rounds)] for cell, rounds in sorted(found.items())}


def spread(values: Sequence[float], form: str = ".3g") -> str:
    """Median and range of several rounds."""
    if not values:
        return "-"
    middle = format(statistics.median(values), form)
    return middle if len(values) == 1 else f"{middle} ({min(values):{form}} to {max(values):{form}})"


def judged(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Every bar of every cell: ratios within a round, their median, and whether it holds; without rounds None."""
    found = []
    for (law, limit), rounds in by_cell(records).items():
        for bar in BARS:
            values = []
            for arms in rounds:
                try:
                    values.append(bar.value(arms))
                except KeyError:  # an arm of this round failed, or was left out
                    continue
            middle = statistics.median(values) if values else None
            holds = None if middle is None else bar.holds(middle)
            found.append(
                {"law": law, "limit": limit, "bar": bar.name, "want": bar.words, "values": values, "holds": holds}
            )
    return found


COLUMNS: tuple[tuple[str, Callable[[Record], float | None], str], ...] = (
    ("tok/s", lambda r: r["tok_s"], ".3g"),
    ("MB read a token", lambda r: r["mb_token"], ".0f"),
    ("requests a token", lambda r: r.get("requests_token"), ".0f"),
    ("hits", lambda r: r.get("hit_rate"), ".3f"),
    ("GB/s in flight", lambda r: r["mb_token"] / r["busy_s_token"] / 1e3 if "busy_s_token" in r else None, ".2f"),
    ("fio GB/s", lambda r: r.get("fio_gb_s"), ".2f"),
    ("LRU limit tok/s", lambda r: limit_tok_s(r) if "lru_mb_token" in r else None, ".3g"),
    ("own share", lambda r: r.get("overhead_share"), ".3f"),
)


def table(records: Sequence[Record]) -> str:
    """Markdown: an arm of a cell a line, medians of rounds with their range; then the bars."""
    names = [name for name, *_ in COLUMNS]
    lines = [f"| routing | limit | arm | {' | '.join(names)} |", "|" + "---|" * (len(names) + 3)]
    for (law, limit), rounds in by_cell(records).items():
        for arm in dict.fromkeys(name for arms in rounds for name in arms):
            cells = []
            for _, value, form in COLUMNS:
                known = [found for arms in rounds if arm in arms and (found := value(arms[arm])) is not None]
                cells.append(spread(known, form))
            lines.append(f"| {law} | {limit} | {arm} | {' | '.join(cells)} |")
    for record in records:
        if "error" in record:
            lines += [
                "",
                f"{record['arm']}, {record['law']}, {record['limit']}, round {record['round']}: {record['error']}",
            ]
    lines += ["", "| bar | wanted | routing | limit | median and range | |", "|---|---|---|---|---|---|"]
    for found in judged(records):
        verdict = {True: "kept", False: "**missed**", None: "not measured"}[found["holds"]]
        cells = [found[key] for key in ("bar", "want", "law", "limit")]
        lines.append(f"| {' | '.join(cells)} | {spread(found['values'])} | {verdict} |")
    for (law, limit), rounds in by_cell(records).items():
        gains = [
            arms["ssd_llama"]["tok_s"] / arms["ssd_llama/checkpoint"]["tok_s"]
            for arms in rounds
            if {"ssd_llama", "ssd_llama/checkpoint"} <= arms.keys()
        ]
        lines.append(f"| {PACKED_GAIN} | | {law} | {limit} | {spread(gains)} | |")
    return "\n".join(lines)
