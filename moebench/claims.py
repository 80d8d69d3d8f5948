"""What others published, as data: each claim with its setting, metric, value, source, band and what is unknown.

``arms`` are what has to be run, in the words of ``moebench run``; a claim takes a quantity of one arm, or sets it
against another's. The band is declared with the claim, before anything is run. Knows no files
and no rows, and runs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moebench.errors import UsageError, unknown
from moebench.quantities import FAMILIES, family

KINDS = ("run", "cache", "trace", "size")  # a cell; a cache replay without a clock; routing alone; arithmetic
FORMS = ("value", "ratio", "change")
TAKES = ("one", "mean", "max", "best_at")
INPUTS = ("result", "setting")


@dataclass(frozen=True)
class Band:
    """How far from a published number counts as met: a ``factor`` either way, or so many ``points`` of its unit."""

    why: str
    factor: float = 0.0
    points: float = 0.0

    def __post_init__(self) -> None:
        if (self.factor > 1) == (self.points > 0) or 0 < self.factor <= 1 or self.points < 0:
            raise UsageError(f"a band has a factor above 1 or points above 0, got {self.factor} and {self.points}")
        if not self.why:
            raise UsageError("a band needs its why")

    def holds(self, published: tuple[float, float], ours: float) -> bool:
        """Whether ``ours`` lies in the published range, widened."""
        low, high = published
        if self.points:
            return low - self.points <= ours <= high + self.points
        ends = [end * by for end in (low, high) for by in (self.factor, 1 / self.factor)]
        return min(ends) <= ours <= max(ends)

    def __str__(self) -> str:
        return f"within {self.points:g}" if self.points else f"within a factor of {self.factor:g}"


@dataclass(frozen=True)
class Input:
    """One of our inputs that comes from the paper itself: of a profile, a geometry, a system or an arm.

    A ``result`` spoils the independence of claims of the families that it ``bears_on``; a ``setting`` only says what
    was run there.
    """

    of: str
    what: str
    kind: str
    bears_on: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _one_of("input kind", self.kind, INPUTS)
        for name in self.bears_on:
            _one_of("family", name, FAMILIES)
        if (self.kind == "result") != bool(self.bears_on):
            raise UsageError(f"input {self.of}: {self.what}: a result bears on something, a setting on nothing")


@dataclass(frozen=True)
class Arm:
    """Something to run or to compute. ``options`` are those of ``moebench run`` (kind ``run``), or of its kind."""

    name: str
    kind: str
    options: Mapping[str, Any]

    def __post_init__(self) -> None:
        _one_of("kind of arm", self.kind, KINDS)

    @property
    def touches(self) -> set[str]:
        """What an input may be ``of``: the arm, its machine, model or system by name, or an option (``KEY=VALUE``)."""
        named = [str(self.options[name]) for name in ("hw", "model", "system") if name in self.options]
        return {self.name, *named, *self.words}

    @property
    def words(self) -> list[str]:
        """Its options as they are written on a command line."""
        return [f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in self.options.items()]


@dataclass(frozen=True)
class Claim:
    """One published number, or a range of two. ``of`` names the arms that have it, ``over`` those it is set against.

    ``form``: the value itself, the ratio of the two, or the change in percent. Of several arms ``take`` the mean, the
    largest, or (``best_at``) the entry of ``at`` whose arm is best. ``seed``: what the seed article made of it.
    """

    name: str
    says: str
    published: tuple[float, float]
    unit: str
    source: str
    metric: str = ""
    of: tuple[str, ...] = ()
    over: tuple[str, ...] = ()
    form: str = "value"
    take: str = "one"
    at: tuple[float, ...] = ()
    band: Band | None = None
    unknown: str = ""
    not_testable: str = ""
    seed: str = ""

    def __post_init__(self) -> None:
        for name in ("says", "unit", "source"):
            if not getattr(self, name):
                raise UsageError(f"claim {self.name}: {name} is empty")
        _one_of(f"form of claim {self.name}", self.form, FORMS)
        _one_of(f"take of claim {self.name}", self.take, TAKES)
        if bool(self.of) == bool(self.not_testable):
            raise UsageError(f"claim {self.name} needs arms in of, or not_testable with the reason, and not both")
        if self.of:
            if self.band is None:
                raise UsageError(f"claim {self.name}: a claim that is run needs a band")
            family(self.metric)
        if self.published[0] > self.published[1]:
            raise UsageError(f"claim {self.name}: published must be [low, high]")
        if bool(self.over) != (self.form != "value"):
            raise UsageError(f"claim {self.name}: form ratio and change take over, form value does not")
        if self.over and len(self.over) != len(self.of):
            raise UsageError(f"claim {self.name}: as many arms in over as in of")
        if (len(self.of) > 1) != (self.take != "one") or (len(self.at) != (len(self.of) * (self.take == "best_at"))):
            raise UsageError(f"claim {self.name}: several arms need take (mean, max, or best_at with as many at)")

    @property
    def family(self) -> str:
        """What kind of number it is: time, traffic, memory or quality."""
        return family(self.metric) if self.metric else "quality"

    @property
    def arms(self) -> tuple[str, ...]:
        """All arms that it needs."""
        return (*self.of, *self.over)


@dataclass(frozen=True)
class Paper:
    """One file: a paper, how our inputs name it (``keys``), its inputs here, arms and claims."""

    name: str
    title: str
    keys: tuple[str, ...]
    inputs: tuple[Input, ...]
    arms: Mapping[str, Arm]
    claims: Mapping[str, Claim]
    notes: str = ""

    def __post_init__(self) -> None:
        for claim in self.claims.values():
            for arm in claim.arms:
                if arm not in self.arms:
                    raise unknown(f"arm of claim {claim.name}", arm, self.arms)
        used = {arm for claim in self.claims.values() for arm in claim.arms}
        if idle := sorted(set(self.arms) - used):
            raise UsageError(f"claims of {self.name}: no claim uses arm {', '.join(idle)}")

    def shared(self, claim: Claim) -> list[Input]:
        """Results of this paper that our number for ``claim`` rests on."""
        touched = set().union(*(self.arms[name].touches for name in claim.arms)) if claim.arms else set()
        return [i for i in self.inputs if i.kind == "result" and i.of in touched and claim.family in i.bears_on]


def _one_of(what: str, given: str, valid: Sequence[str]) -> None:
    if given not in valid:
        raise unknown(what, given, valid)
