"""The files of claims, one for each paper: reading and checking them, and finding a claim or its figure.

``configs/claims/*.yaml`` is the one place of a published number: rows that stand beside those of ``moebench run`` and
surrogates take theirs from here. Runs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import yaml

from moebench.claims import Arm, Band, Claim, Input, Paper
from moebench.errors import UsageError, unknown
from moebench.quantities import per_token_ms

T = TypeVar("T")


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
    """The published value of a claim (the middle of a range) and its source, as ``metric`` of a row counts it; as the
    claim itself does where that is empty.
    """
    for one in papers():
        if name in one.claims:
            claim = one.claims[name]
            value = sum(claim.published) / 2
            if (
                "" in (claim.metric, metric)
                or claim.metric == metric
                or (claim.metric, metric) == ("blocked_ms", "stall_ms_per_token")
            ):
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
    ends: list[Any] = value if isinstance(value, list) else [value, value]
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
