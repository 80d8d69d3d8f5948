"""What overlap may save, in modeled runs of every system: never more than the shorter of reading and all else; for a
predictor that sees one layer ahead, layer by layer. A clock that cheats is caught.

Read times are the least there can be: bytes over the best throughput that the machine's curve gives anywhere.
"""

# ruff: noqa: F811 - fixtures are imported

from __future__ import annotations

from collections import defaultdict

import pytest
from harness_fixtures import plugin  # noqa: F401 - a fixture

import moebench
from moebench.harness import clocks
from moebench.plugins import load_plugins
from moebench.timeline.base import OVERHEAD
from moebench.timeline.virtual import VirtualTimeline

ONE_LAYER = ("specprefetch",)
LAYERS, EXPERTS = 16, 64  # of the model below
SYSTEMS = sorted(load_plugins().systems)
RUN = {
    "model": "olmoe-1b-7b", "budget": "0.3", "quality": "none", "warmup_tokens": 0, "mode": "model",
    "workload.requests": 1, "workload.prompt_tokens": 2, "workload.new_tokens": 8,
}  # fmt: skip
SLACK = 1e-6  # seconds, for sums of floats


class Watched(VirtualTimeline):
    """The modeled clock, with a note of every read and every layer."""

    def __init__(self, costs, places=None) -> None:
        super().__init__(costs, places)
        self.visits: list[tuple[float, float]] = []  # of each layer's begin: now, and seconds not spent waiting
        self.asked: dict[int, list] = defaultdict(list)  # tickets by key
        RUNS.append(self)

    def compute_dense(self, layers, rows, state_bytes, final) -> None:
        if layers:
            self.visits.append((self.now(), self.busy()))
        super().compute_dense(layers, rows, state_bytes, final)

    def busy(self) -> float:
        """Seconds so far that were not spent waiting for transfers."""
        return self.spent[0] + self.spent[OVERHEAD]

    def read(self, keys, slots, tier, priority, together=()):
        before = self.storage_bytes
        tickets = super().read(keys, slots, tier, priority, together)
        if self.storage_bytes > before:
            for ticket in tickets:
                self.asked[ticket.key].append((len(self.visits) - 1, ticket))
        return tickets


class Cheating(Watched):
    """Reads take a tenth of their time, which storage never has to give back."""

    def _unlimited(self, start, each, alone, waiting):
        return super()._unlimited(start, [took / 10 for took in each], alone / 10, waiting)

    def _sweep(self, until) -> None:
        self._left = dict.fromkeys(self._left, 0.0)
        super()._sweep(until)


RUNS: list[Watched] = []


def watched(monkeypatch, clock=Watched, **options) -> Watched:
    """The clock of one run."""
    RUNS.clear()
    monkeypatch.setattr(clocks, "VirtualTimeline", clock)
    (row, *_) = moebench.run(**{**RUN, **options})
    assert row.status == "ok", row.error
    return RUNS[-1]


def best_s(run: Watched, nbytes: float) -> float:
    """The least seconds in which ``nbytes`` can be read: whatever the queue, the size of a request, the neighbours."""
    costs = run.costs
    rates = [costs.read_bytes / seconds for seconds in costs.read_s[1:]]
    whole = [costs.read_bytes * n for n in (1, 2, 4, 16, 64)]
    rates += [size / costs.request_s(size, depth) for size in whole for depth in (1, 8, 32)]
    return nbytes / max(rates)


def saved(run: Watched) -> tuple[float, float, float]:
    """(saved, read time, time not spent waiting) of a run: what reading one after all else would have taken more."""
    reading, busy = best_s(run, run.storage_bytes), run.busy()
    return reading + busy - run.now(), reading, busy


def per_layer(run: Watched) -> tuple[float, float]:
    """What the reads that a layer made use of saved at least, and the most that a predictor of one layer can hide: of
    each layer's reads no more than what was computed since the layer before it began.
    """
    reads: dict[int, float] = defaultdict(float)
    least = best_s(run, run.costs.read_bytes)
    for key, tickets in run.asked.items():
        for visit, _ in tickets:
            mine = visit + (key // EXPERTS - visit) % LAYERS  # the next visit of the key's layer
            reads[mine] += least
    ends = [*run.visits[1:], (run.now(), run.busy())]
    took = [end[1] - begin[1] for begin, end in zip(run.visits, ends, strict=True)]
    bound = sum(min(seconds, took[visit] + (took[visit - 1] if visit else 0)) for visit, seconds in reads.items())
    waited = run.now() - run.busy()
    return sum(reads.values()) - waited, bound


@pytest.mark.parametrize("hw", ["m4pro", "rtx5090_32gb", "snapdragon_8_gen3"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_no_run_saves_more_than_the_shorter_of_reading_and_all_else(plugin, monkeypatch, system, hw):
    gained, reading, busy = saved(watched(monkeypatch, system=system, hw=hw))
    assert gained <= min(reading, busy) + SLACK


@pytest.mark.parametrize("budget", ["0.2", "0.6"])
@pytest.mark.parametrize("system", ONE_LAYER)
def test_a_predictor_of_one_layer_hides_no_layer_behind_two(plugin, monkeypatch, system, budget):
    run = watched(monkeypatch, system=system, hw="m4pro", budget=budget)
    gained, bound = per_layer(run)
    assert gained <= bound + SLACK


@pytest.mark.parametrize("system", ["lru", "ondemand", "specprefetch"])
def test_a_clock_that_cheats_is_caught(plugin, monkeypatch, system):
    run = watched(monkeypatch, Cheating, system=system, hw="m4pro")
    gained, reading, busy = saved(run)
    assert gained > min(reading, busy) + SLACK
    gained, bound = per_layer(run)
    assert gained > bound + SLACK
