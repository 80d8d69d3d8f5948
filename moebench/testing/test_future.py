"""Knowledge of the future: none, unless it is declared."""

from __future__ import annotations

from itertools import zip_longest

import pytest

from moebench.testing.audit import Audit, Chance
from moebench.testing.lab import Lab
from moebench.testing.replays import middle, parted, replay, uniform
from moebench.testing.subject import Subject
from moebench.trace.format import Trace

DEVIATIONS = 5.0


def test_what_comes_later_changes_nothing_before(lab: Lab, subject: Subject, trace: Trace) -> None:
    """Two traces that agree up to a layer of a token and differ after it leave, up to it, the same demands, hits,
    reads, residents and times.

    A system that differs has read ahead in ``Target.trace``, or has files fitted on this very trace. A recorded
    ``predicted`` channel may be read for the token that comes next, no further.
    """
    if subject.foresees:
        pytest.skip(f"{subject.name} declares that it knows the future")
    check_causal(lab, subject, trace)


def check_causal(lab: Lab, subject: Subject, trace: Trace) -> None:
    """Compare the logs of two futures."""
    row, layer, reached = middle(trace)
    logs = []
    for each in (trace, parted(trace, row, layer)):
        audit = Audit(until=reached)
        replay(lab, subject, each, audit)
        assert not audit.logging, "the traces never part"
        logs.append(audit.log)
    for number, (one, two) in enumerate(zip_longest(*logs)):
        assert one == two, f"event {number} before the traces part is {one} in one and {two} in the other"


def test_chance_is_not_beaten(lab: Lab, subject: Subject, trace: Trace) -> None:
    """On uniform, independent routing, what a layer asks for is resident or on its way as often as chance has it, and
    a routing decided ahead meets the router's as often: to five standard deviations.

    More is knowledge of what nobody can know; less is knowledge too, turned round.
    """
    if subject.foresees:
        pytest.skip(f"{subject.name} declares that it knows the future")
    for what, chance in chances(lab, subject, trace).items():
        assert abs(chance.score) < DEVIATIONS, (
            f"{what}: {chance.found} of {chance.events} draws, chance gives {chance.expected:.1f}, "
            f"{chance.score:+.1f} standard deviations"
        )


def chances(lab: Lab, subject: Subject, trace: Trace) -> dict[str, Chance]:
    """How a system fares on uniform routing."""
    audit = Audit()
    replay(lab, subject, uniform(trace), audit)
    assert audit.resident.events > 300, f"only {audit.resident.events} draws"
    return {"resident or on its way": audit.resident, "routed ahead": audit.routed}
