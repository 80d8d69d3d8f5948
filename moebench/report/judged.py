"""Published claims beside what was found here: our number, its ratio, the verdict, and what a gap would take.

Reasons of gaps are arithmetic on the parts of our own modeled time, bytes and memory, not opinions. Knows claims and
numbers; runs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moebench.claims import Claim, Input, Paper
from moebench.quantities import MS_PER_TOKEN, Found, per_token_ms
from moebench.report.table import number

WITHIN, OUTSIDE, NOT_TESTABLE, FAILED = "within", "outside", "not testable", "failed"
PARTS = {"stall": "read", "copy": "copy", "decode": "decode", "compute": "compute", "overhead": "overhead"}
MOVES = ("stall", "copy", "decode")
RATES = ("decode_tok_s", *MS_PER_TOKEN)


@dataclass(frozen=True)
class Judged:
    """One claim and what became of it."""

    paper: Paper
    claim: Claim
    verdict: str
    ours: float | None = None
    shared: tuple[Input, ...] = ()
    reasons: tuple[str, ...] = ()

    @property
    def independent(self) -> bool:
        """Whether no result of the paper is among our inputs."""
        return not self.shared

    @property
    def told(self) -> str:
        """The verdict in words."""
        if self.ours is None or self.independent:
            return self.verdict
        return f"not independent ({self.verdict})"

    @property
    def ratio(self) -> float | None:
        """Ours over the nearest published value; None where signs differ, or nothing was found."""
        end = nearest(self.claim.published, self.ours) if self.ours is not None else 0.0
        return self.ours / end if self.ours is not None and end and self.ours / end > 0 else None


def judge(paper: Paper, claim: Claim, found: Mapping[str, Found]) -> Judged:
    """The verdict on one claim, given what became of its arms."""
    if not claim.of:
        return Judged(paper, claim, NOT_TESTABLE, reasons=(claim.not_testable,))
    if errors := [f"{name}: {found[name].error}" for name in claim.arms if found[name].error]:
        return Judged(paper, claim, FAILED, reasons=tuple(errors))
    values = [found[name].numbers.get(claim.metric) for name in claim.arms]
    if None in values:
        lacking = ", ".join(name for name, value in zip(claim.arms, values, strict=True) if value is None)
        return Judged(paper, claim, FAILED, reasons=(f"no {claim.metric} was found for {lacking}",))
    known = [value for value in values if value is not None]
    own, against = known[: len(claim.of)], known[len(claim.of) :]
    try:
        each = [_formed(claim, one, other) for one, other in zip(own, against or [1.0] * len(own), strict=True)]
    except ZeroDivisionError:
        return Judged(paper, claim, FAILED, reasons=("what it is set against is 0 here",))
    ours = _taken(claim, each)
    assert claim.band is not None  # a claim that is run has one
    verdict = WITHIN if claim.band.holds(claim.published, ours) else OUTSIDE
    reasons: list[str] = []
    if verdict == OUTSIDE and len(each) == 1:
        numbers = [found[name].numbers for name in claim.arms]
        reasons = gaps(claim, ours, numbers[0], numbers[1] if len(numbers) > 1 else None)
    elif verdict == OUTSIDE:
        reasons = [_several(claim, own, against, each)]
    return Judged(paper, claim, verdict, ours, tuple(paper.shared(claim)), tuple(reasons))


def _formed(claim: Claim, own: float, other: float) -> float:
    if claim.form == "ratio":
        return own / other
    return 100 * (own / other - 1) if claim.form == "change" else own


def _taken(claim: Claim, each: Sequence[float]) -> float:
    if claim.take == "mean":
        return sum(each) / len(each)
    best = max(range(len(each)), key=lambda n: each[n])
    return claim.at[best] if claim.take == "best_at" else each[best]


def _several(claim: Claim, own: Sequence[float], against: Sequence[float], each: Sequence[float]) -> str:
    """Every arm with its number, and what it is set against."""
    if not against:
        return ", ".join(f"{name} {number(value)}" for name, value in zip(claim.of, own, strict=True))
    lines = zip(claim.of, own, claim.over, against, each, strict=True)
    return ", ".join(f"{a} {number(x)} over {b} {number(y)}: {number(z)}" for a, x, b, y, z in lines)


def nearest(published: tuple[float, float], ours: float) -> float:
    """The published value that is nearest to ours: ours itself is not published, so an end of the range, or inside."""
    low, high = published
    return low if ours <= low else high if ours >= high else ours


# --- what a gap would take ---------------------------------------------------------------------------------------


def gaps(claim: Claim, ours: float, own: Mapping[str, float], other: Mapping[str, float] | None) -> list[str]:
    """Which part of our own time, bytes or memory would have to be how large, alone, for the published number."""
    end = nearest(claim.published, ours)
    if claim.metric in RATES:
        if other is None:
            return _time("ours", own, per_token_ms(claim.metric, end))
        wanted = end if claim.form == "ratio" else 1 + end / 100
        if wanted <= 0:
            return []
        faster = wanted if claim.metric == "decode_tok_s" else 1 / wanted  # own arm's speed over the other's
        return [
            *_time(f"{claim.of[0]}", own, other["token_ms"] / faster),
            *_time(f"or {claim.over[0]}", other, own["token_ms"] * faster),
        ]
    if other is not None:
        pair = f"{claim.of[0]} {number(own[claim.metric])}, {claim.over[0]} {number(other[claim.metric])}"
        return [f"the two here: {pair}"]
    if claim.metric in ("stall_ms_per_token", "blocked_ms"):
        return _stall(own, ours, end)
    if claim.metric in ("ssd_mib_per_token", "read_gb_per_token", "reads_per_token"):
        return _traffic(own, end / ours)
    if claim.metric in ("touched_mb", "touched_gb"):
        return [
            f"{number(own['layers'])} layers x {number(own['top_k'])} experts x {number(own['expert_mib'])} MiB; the "
            f"published is {number(own['layers'] * own['top_k'] * end / ours)} experts"
        ]
    if claim.metric in ("allocator_peak_gib", "peak_active_gib"):
        return _memory(ours, own, end)
    return []


def _time(who: str, own: Mapping[str, float], wanted_ms: float) -> list[str]:
    parts = {part: own.get(f"split.{part}", 0.0) for part in PARTS}
    total = sum(parts.values())
    if not total:
        return []
    gap = wanted_ms - total
    spent = ", ".join(f"{PARTS[part]} {number(ms)}" for part, ms in parts.items() if ms)
    alone = [
        f"{PARTS[part]} {number((ms + gap) / ms)} times"
        for part, ms in parts.items()
        if ms > 0.01 * total and ms + gap >= 0
    ]
    moves = sum(parts[part] for part in MOVES)
    hit = own.get("hit_rate")
    if hit is not None and moves > 0.01 * total and 0 <= (rate := 1 - (1 - hit) * (moves + gap) / moves) <= 1:
        alone.append(f"a hit rate of {number(rate)} for {number(hit)}")
    change = f"alone that takes {', or '.join(alone)}" if alone else "no part of it alone is enough"
    said = f"{who}: {number(total)} ms a token ({spent}), {number(wanted_ms)} wanted; {change}"
    return [said]


def _stall(own: Mapping[str, float], ms: float, wanted_ms: float) -> list[str]:
    reads = own.get("reads_per_token")
    if not reads or not ms:
        return []
    said = f"{number(ms)} ms stand for {number(reads)} reads a token, {number(ms / reads)} ms each"
    return [
        f"{said}; the published takes {number(wanted_ms / reads)} ms each, or {number(wanted_ms * reads / ms)} reads"
    ]


def _traffic(own: Mapping[str, float], times: float) -> list[str]:
    reads, hit, size = (own.get(name) for name in ("reads_per_token", "hit_rate", "expert_mib"))
    if not reads:
        return []
    said = f"{number(reads)} experts a token are missed here; the published takes {number(reads * times)}"
    if hit is not None and 0 <= (rate := 1 - (1 - hit) * times) <= 1:
        said += f", a hit rate of {number(rate)} for {number(hit)}"
    came = own.get("ssd_mib_per_token")
    if size and came is not None and (share := came / (reads * size)) < 0.9:  # the rest is in the page cache
        said += f", or {number(100 * share * times)} % of their bytes from storage for {number(100 * share)} %"
    return [said]


def _memory(ours: float, own: Mapping[str, float], wanted: float) -> list[str]:
    slots = own.get("slots_gib", 0.0)
    rest = ours - slots
    said = f"{number(slots)} GiB are expert slots, {number(max(rest, 0.0))} all else"
    return [f"{said}; the published leaves {number(wanted - rest)} GiB for slots" if wanted > rest else said]
