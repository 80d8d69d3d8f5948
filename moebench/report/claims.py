"""The tables of published claims beside what was found here: for a terminal, as JSON, and as a page of the docs.

Knows judged claims; runs nothing.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence

from moebench.claims import Arm, Paper
from moebench.report.judged import FAILED, NOT_TESTABLE, OUTSIDE, Judged
from moebench.report.plain import Plain, to_markdown
from moebench.report.table import number
from moebench.result import SCHEMA

HEADER = ("claim", "published", "ours", "ratio", "verdict")
INTRO = """# Published claims, put to the test

Written by `moebench reproduce docs=docs/claims.md` (`make claims`): edit `configs/claims/*.yaml`, never this page.

Each published number stands beside the same quantity modeled here, by the publication's own definition: an
allocator's peak beside an allocator's peak, a ratio only where both its arms are run here with the same inputs.
Machines, traces and bands are fixed before a claim is run, by their own sources, and nothing is tuned to one. What our
model contradicts stays contradicted.

- **within**, **outside**: whether ours lies in the band that the claim declares. *ratio* is ours over published (over
  the nearer end of a range).
- **not independent**: a result of the same paper is among our inputs, so agreement proves little; whether it lies
  within stands in brackets.
- **not testable**: what it would take is not here; the reason stands below the table.
- Below a table stand, for what is outside, our own time, bytes or memory in parts, and what each part alone, with all
  else as it is here, would have to be for the published number. This is computed.
- Numbers are modeled on declared machines with synthetic routing; no weights ran. Where a prediction has no weights it
  is a surrogate with stated statistics.
"""


def document(judged: Sequence[Judged]) -> str:
    """The last line of stdout: every claim in one compact JSON document."""
    plain = [
        {
            "claim": one.claim.name, "paper": one.paper.name, "metric": one.claim.metric, "unit": one.claim.unit,
            "published": list(one.claim.published), "source": one.claim.source, "ours": one.ours, "ratio": one.ratio,
            "verdict": one.verdict, "independent": one.independent, "reasons": list(one.reasons),
        }
        for one in judged
    ]  # fmt: skip
    return json.dumps({"schema": SCHEMA, "claims": plain}, sort_keys=True, separators=(",", ":"), allow_nan=False)


def tables(judged: Sequence[Judged]) -> list[Plain]:
    """One table for each paper; below it what a gap would take, and why a claim cannot be tested."""
    made = []
    for paper in _papers(judged):
        own = [one for one in judged if one.paper.name == paper.name]
        notes = [f"{one.claim.name}: {reason}" for one in own for reason in one.reasons]
        made.append(Plain(paper.title, HEADER, tuple(_line(one) for one in own), tuple(notes), labels=1))
    return made


def counts(judged: Sequence[Judged]) -> str:
    """One line: how many claims met which verdict."""
    count = Counter(one.told for one in judged)
    return f"{len(judged)} claims: " + ", ".join(f"{n} {told}" for told, n in sorted(count.items()))


def failed(judged: Iterable[Judged]) -> bool:
    """Whether a claim could not be answered though it has arms."""
    return any(one.verdict == FAILED for one in judged)


def page(judged: Sequence[Judged]) -> str:
    """The page of the docs, the same bytes for the same claims and numbers."""
    parts = [INTRO, f"{counts(judged)}.\n"]
    seeds = [one for one in judged if one.claim.seed]
    if seeds:
        rows = tuple((one.claim.seed, *_line(one)) for one in seeds)
        parts.append("## Figures of the seed article\n")
        parts.append(to_markdown([Plain("What it says, and what became of it", ("seed", *HEADER), rows, labels=2)]))
    for paper in _papers(judged):
        parts.append(_chapter(paper, [one for one in judged if one.paper.name == paper.name]))
    return "\n".join(parts).rstrip() + "\n"


def _chapter(paper: Paper, judged: Sequence[Judged]) -> str:
    parts = [f"## {paper.title}\n"]
    if paper.notes:
        parts.append(f"{paper.notes.strip()}\n")
    head = ("claim", "what is claimed", *HEADER[1:])
    rows = tuple((one.claim.name, one.claim.says, *_line(one)[1:]) for one in judged)
    parts.append(to_markdown([Plain("Claims", head, rows, labels=2)]))
    for title, lines in (
        ("What is outside, and what it would take:", _bullets(judged, OUTSIDE)),
        ("What failed:", _bullets(judged, FAILED)),
        ("What cannot be tested here:", _bullets(judged, NOT_TESTABLE)),
        ("Bands, sources and what is unknown:", [_about(one) for one in judged if one.claim.of]),
        ("Inputs of ours that come from this paper:", [f"{i.of}: {i.what} ({i.kind})" for i in paper.inputs]),
        ("What was run:", [f"`{name}`: {command(arm)}" for name, arm in paper.arms.items()]),
    ):
        if lines:
            parts.append("\n".join([title, "", *(f"- {line}" for line in lines), ""]))
    return "\n".join(parts)


def _bullets(judged: Sequence[Judged], verdict: str) -> list[str]:
    found = []
    for one in judged:
        if one.verdict == verdict:
            found.append(f"**{one.claim.name}**: {'; '.join(one.reasons) or _line(one)[2]}")
    return found


def _about(one: Judged) -> str:
    claim = one.claim
    against = f" over {', '.join(claim.over)}" if claim.over else ""
    said = [f"**{claim.name}**: {claim.metric} of {', '.join(claim.of)}{against}; {claim.source}"]
    said.append(f"band: {claim.band}, {claim.band.why}" if claim.band else "")
    said.append(f"unknown: {claim.unknown}" if claim.unknown else "")
    said.append(f"rests on {', '.join(f'{i.of} {i.what}' for i in one.shared)}" if one.shared else "")
    return ". ".join(filter(None, said))


def command(arm: Arm) -> str:
    """How an arm is run, for people."""
    words = " ".join(arm.words)
    return f"`moebench run {words} quality=none mode=model`" if arm.kind == "run" else f"{arm.kind} {words}"


def _line(one: Judged) -> tuple[str, ...]:
    claim = one.claim
    ours = "-" if one.ours is None else f"{_signed(claim.form, one.ours)} {claim.unit}"
    ratio = "-" if one.ratio is None else number(one.ratio)
    low, high = (_signed(claim.form, end) for end in claim.published)
    published = f"{low} {claim.unit}" if low == high else f"{low} to {high} {claim.unit}"
    return (claim.name, published, ours, ratio, one.told)


def _signed(form: str, value: float) -> str:
    """A number for people; a change with its sign."""
    text = number(value)
    return f"+{text}" if form == "change" and value > 0 else text


def _papers(judged: Sequence[Judged]) -> list[Paper]:
    return list({one.paper.name: one.paper for one in judged}.values())
