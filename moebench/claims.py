"""What others published, as data: each claim with its setting, metric, value, source, band and what is unknown.

One file of ``configs/claims`` for each paper. ``arms`` are what has to be run, in the words of ``moebench run``; a
claim takes a quantity of one arm, or sets it against another's. The band is declared here, before anything is run.
Knows no rows and runs nothing; the numbers that stand beside rows of ``moebench run`` come from here too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import yaml

from moebench.errors import UsageError, unknown
from moebench.quantities import FAMILIES, family, per_token_ms

KINDS = ("run", "cache", "trace", "size")  # a cell; a cache replay without a clock; routing alone; arithmetic
FORMS = ("value", "ratio", "change")
TAKES = ("one", "mean", "max", "best_at")
INPUTS = ("result", "setting")
T = TypeVar("T")


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
    bands: Mapping[str, Band] = field(default_factory=dict)

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


def names() -> list[str]:
    """Papers that have a file of claims."""
    return sorted(path.stem for path in _folder().glob("*.yaml"))


def _folder() -> Path:
    return Path(str(resources.files("moebench.configs"))) / "claims"


@cache
def paper(name: str) -> Paper:
    """The claims of one paper that ships with moebench."""
    path = _folder() / f"{name}.yaml"
    if not path.is_file():
        raise unknown("paper", name, names())
    return load(path)


def papers() -> list[Paper]:
    """All papers, in order."""
    return [paper(name) for name in names()]


def figure(name: str, metric: str) -> tuple[float, str]:
    """The published value of a claim (the middle of a range) and its source, as ``metric`` of a row counts it."""
    for one in papers():
        if name in one.claims:
            claim = one.claims[name]
            value = sum(claim.published) / 2
            if claim.metric in ("", metric):
                return value, claim.source
            if metric == "decode_tok_s":
                return 1e3 / per_token_ms(claim.metric, value), claim.source
            raise UsageError(f"claim {name} is about {claim.metric}, not about {metric}")
    raise unknown("claim", name, [claim for one in papers() for claim in one.claims])


def chosen(wanted: Sequence[str]) -> list[tuple[Paper, Claim]]:
    """Claims by name, by paper, or ``all``."""
    every = [(one, claim) for one in papers() for claim in one.claims.values()]
    if list(wanted) == ["all"]:
        return every
    valid = {one.name for one, _ in every} | {claim.name for _, claim in every}
    if missing := [name for name in wanted if name not in valid]:
        raise unknown("claim", missing[0], valid, "; or all")
    return [(one, claim) for one, claim in every if one.name in wanted or claim.name in wanted]


def load(path: Path) -> Paper:
    """Read one file; what is unknown, missing or contradictory is one line that names file and field."""
    try:
        data = yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{path}: {' '.join(str(error).split())}") from None
    where = path.name
    keys = ("title", "keys", "inputs", "bands", "arms", "claims", "notes")
    if not isinstance(data, dict) or not {"title", "keys", "claims"} <= set(data) <= set(keys):
        raise UsageError(f"{where}: expected a mapping with {', '.join(keys)}, of which title, keys and claims must be")
    bands = {name: _build(Band, body, f"{where}: band {name}") for name, body in (data.get("bands") or {}).items()}
    claims = {name: _claim(name, body, bands, where) for name, body in data["claims"].items()}
    try:
        return Paper(
            name=path.stem,
            title=str(data["title"]),
            keys=tuple(map(str, data["keys"])),
            inputs=tuple(_build(Input, body, f"{where}: inputs") for body in data.get("inputs") or ()),
            arms=_arms(data.get("arms") or {}, where),
            claims=claims,
            notes=str(data.get("notes", "")),
            bands=bands,
        )
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def _arms(data: Mapping[str, Any], where: str) -> dict[str, Arm]:
    """Arms by name; one may be ``like`` another and change some of its options."""
    found: dict[str, dict[str, Any]] = {}
    for name, body in data.items():
        own = dict(body)
        like = own.pop("like", None)
        if like is not None and like not in found:
            raise unknown(f"arm that {name} is like", like, found, "; it must stand above")
        found[name] = {**(found[like] if like else {}), **own}
    arms = {}
    for name, options in found.items():
        if not name.startswith("_"):  # those are there to be like
            kind = str(options.get("kind", "run"))
            arms[name] = Arm(name, kind, {key: value for key, value in options.items() if key != "kind"})
    return arms


def _claim(name: str, body: Any, bands: Mapping[str, Band], where: str) -> Claim:
    where = f"{where}: claim {name}"
    if not isinstance(body, dict):
        raise UsageError(f"{where} must be a mapping, got {body!r}")
    given = dict(body)
    value = given.get("published")
    ends = value if isinstance(value, list) else [value, value]
    if len(ends) != 2 or not all(isinstance(end, int | float) and not isinstance(end, bool) for end in ends):
        raise UsageError(f"{where}: published must be a number or [low, high], got {value!r}")
    given["published"] = (float(ends[0]), float(ends[1]))
    band = given.get("band")
    if isinstance(band, str):
        if band not in bands:
            raise unknown(f"band of claim {name}", band, bands)
        given["band"] = bands[band]
    elif band is not None:
        given["band"] = _build(Band, band, f"{where}: band")
    for key in ("of", "over"):
        if isinstance(given.get(key), str):
            given[key] = [given[key]]
    return _build(Claim, {**given, "name": name}, where)


def _build(cls: type[T], body: Any, where: str) -> T:
    """A dataclass from a mapping; unknown and missing keys are one line that lists the valid ones."""
    if not isinstance(body, dict):
        raise UsageError(f"{where}: expected a mapping, got {body!r}")
    known = [entry.name for entry in fields(cls)]  # type: ignore[arg-type]
    if extra := [key for key in body if key not in known]:
        raise unknown(f"key of {where}", extra[0], known)
    needed = [e.name for e in fields(cls) if e.default is MISSING and e.default_factory is MISSING]  # type: ignore[arg-type]
    if missing := [key for key in needed if key not in body]:
        raise UsageError(f"{where}: {', '.join(missing)} is missing")
    plain = {key: tuple(value) if isinstance(value, list) else value for key, value in body.items()}
    try:
        return cls(**plain)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def _one_of(what: str, given: str, valid: Sequence[str]) -> None:
    if given not in valid:
        raise unknown(what, given, valid)
