"""Systems with one defect each, which the conformance suite must find; installed as a plugin by its tests."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field

import numpy as np

from moebench.errors import UsageError
from moebench.hookspecs import hookimpl
from moebench.step import DECODE, PREFILL, Routing
from moebench.systemspec import Equipment, NoKnobs, SystemSpec


class Plain:
    """No defect: evicts what comes first."""

    def __init__(self, knobs, run) -> None:
        self.run, self.experts = run, run.geometry.experts

    @hookimpl
    def evict(self, need, candidates):
        return candidates[:need]


class Peeker(Plain):
    """Reads ahead what the trace says the next token will ask for."""

    @hookimpl
    def begin_step(self, step):
        self.rows = [] if self.run.equipment.content is None else self.find(step)

    def find(self, step):
        trace = self.run.equipment.content
        at = (trace.sequence == step.sequence[-1]) & (trace.position == step.position[-1] + 1)
        return np.flatnonzero(at).tolist()

    @hookimpl
    def prefetch(self, step, point):
        if point != "end" or step.phase == PREFILL:
            return None
        trace = self.run.equipment.content
        return [layer * self.experts + int(trace.experts[row, layer, 0]) for row in self.rows for layer in range(8)]


class Liar(Plain):
    """Says exact, and lets the last expert of each token take the place of the first."""

    @hookimpl
    def route(self, native):
        return Routing(np.roll(native.experts, 1, axis=1), native.weights)


class Scribbler(Plain):
    """Writes into what the router chose."""

    @hookimpl
    def route(self, step, layer, native):
        if layer == 3 and step.phase == DECODE and native.experts[0, 0] != native.experts[0, 1]:
            native.experts[0, :2] = native.experts[0, [1, 0]]


class Breaker(Plain):
    """Takes the slot of an expert that is in use."""

    @hookimpl
    def order_compute(self, ready, view):
        if len(ready) > 1:
            view._experts.device.release(ready[:1])
            view._experts.device.drop(ready[:1])


class Miscounter(Plain):
    """Leaves a read out of the record."""

    @hookimpl
    def end_step(self, record):
        record.demand_reads -= record.demand_reads > 0


class Infinite(Plain):
    """Counts what is no number."""

    @hookimpl
    def report(self):
        return {"ratio": float("nan")}


class Rememberer(Plain):
    """Routes by how many requests there were before."""

    requests = 0

    @hookimpl
    def begin_request(self):
        self.requests += 1

    @hookimpl
    def route(self, native):
        return None if self.requests == 1 else Routing(native.experts[:, :3], native.weights[:, :3])


class Bystander(Plain):
    """Gives a sequence fewer experts where another runs beside it."""

    @hookimpl
    def route(self, step, native):
        if len(set(step.sequence.tolist())) == 1:
            return None
        return Routing(native.experts[:, :3], native.weights[:, :3])


class Residential(Plain):
    """Drops experts that are not resident, and does not say that its answers depend on it."""

    @hookimpl
    def route(self, layer, native, view):
        there = view.resident(layer * self.experts + native.experts.ravel()).reshape(native.experts.shape)
        return Routing(np.where(there | (np.arange(4) == 0), native.experts, -1), native.weights)


class Ahead(Plain):
    """Decides a layer ahead and stages nothing."""

    @hookimpl
    def route(self, step, native):
        return Routing(native.experts, native.weights, ahead=step.phase == DECODE)


class Dice(Plain):
    """Draws without a seed."""

    @hookimpl
    def evict(self, need, candidates):
        return np.random.default_rng().permutation(candidates)[:need]


class Unmarked:
    """Forgot the mark of its hook."""

    def __init__(self, knobs, run) -> None:
        pass

    def evict(self, need, candidates):
        return candidates[:need]


class Grudge(Plain):
    """After a run that failed, which it never came to report, the next one routes otherwise."""

    failed = running = False

    def __init__(self, knobs, run) -> None:
        super().__init__(knobs, run)
        Grudge.failed = Grudge.running

    @hookimpl
    def begin_request(self):
        Grudge.running = True

    @hookimpl
    def route(self, native):
        return Routing(np.roll(native.experts, 1, axis=1), native.weights) if self.failed else None

    @hookimpl
    def report(self):
        Grudge.running = False
        return {}


class Wordy(Plain):
    """Refuses few slots in two lines."""

    def __init__(self, knobs, run) -> None:
        super().__init__(knobs, run)
        if run.slots < 16:
            raise UsageError("too few slots\nand nobody says how many it takes")


class Slow(Plain):
    """Takes its time."""

    @hookimpl
    def acquired(self):
        time.sleep(0.002)


class Hung(Plain):
    """Never comes back."""

    @hookimpl
    def evict(self, need, candidates):
        for _ in itertools.count():
            time.sleep(0.01)


@dataclass(frozen=True)
class Bare:
    """An option without help."""

    depth: int = 3


@dataclass(frozen=True)
class Careful:
    """A configuration as it should be."""

    depth: int = field(default=3, metadata={"help": "an option"})


def files_for_anyone(config, target):
    return Equipment(files={"nets": "0" * 32})


def swelling(config, target, made=itertools.count(1)):  # noqa: B008 - it is the defect
    return Equipment(held_bytes={"predictor": 4096 * next(made)})


def look(config, target):
    return Equipment(content=target.trace)


PLANTED = {
    "plain": (Plain, {"config": Careful}),
    "peeker": (Peeker, {"equip": look, "fidelity": lambda config: "advisory"}),
    "liar": (Liar, {}),
    "scribbler": (Scribbler, {}),
    "breaker": (Breaker, {}),
    "miscounter": (Miscounter, {}),
    "infinite": (Infinite, {}),
    "rememberer": (Rememberer, {"fidelity": lambda config: "altered"}),
    "bystander": (Bystander, {"fidelity": lambda config: "altered"}),
    "residential": (Residential, {"fidelity": lambda config: "altered"}),
    "ahead": (Ahead, {}),
    "dice": (Dice, {}),
    "unmarked": (Unmarked, {}),
    "grudge": (Grudge, {}),
    "wordy": (Wordy, {}),
    "swelling": (Plain, {"equip": swelling}),
    "slow": (Slow, {}),
    "hung": (Hung, {}),
    "bare": (Plain, {"config": Bare}),
    "boastful": (Plain, {"config": Careful, "fidelity": lambda config: "exact" if config.depth == 3 else "perfect"}),
    "generous": (Plain, {"equip": files_for_anyone}),
}


@hookimpl
def register_systems(register):
    for name, (make, more) in PLANTED.items():
        register(SystemSpec(**{"id": name, "title": name, "summary": name, "make": make, "config": NoKnobs, **more}))
