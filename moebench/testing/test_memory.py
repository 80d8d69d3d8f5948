"""Budgets, tiers, leases and the account of what was read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moebench.budget import parse_budget
from moebench.errors import UsageError
from moebench.residency.ledger import BudgetError
from moebench.testing.audit import Audit
from moebench.testing.lab import Lab
from moebench.testing.replays import replay, replayed
from moebench.testing.subject import HW, HW_TIERS, Subject
from moebench.testing.test_answers import SMALLEST, one_line
from moebench.trace.format import Trace

TIERS = {"one tier": HW, "two tiers": HW_TIERS}
HELD = ("expert slots", "host slots", "staging")


@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("budget", ["0.3", "1.0"])
def test_the_budget_holds(lab: Lab, subject: Subject, trace: Trace, budget: str, tiers: str) -> None:
    """Expert slots of all tiers, staging included, never exceed ``budget``; slots, keys and tickets agree after every
    pass and every demand; all that is held is in the ledger.
    """
    if subject.split and tiers == "one tier":
        pytest.skip(f"{subject.name} has options about a host tier")
    audit = Audit()
    run = replay(lab, subject, trace, audit, hw=TIERS[tiers], budget=budget)
    ledger = run.session.ledger
    assert ledger.peak_bytes >= ledger.total_bytes
    for tier in run.session.experts.tiers:
        assert int((tier.slot_of >= 0).sum()) <= tier.slots
    if subject.spec.sizing == "budget":
        held = sum(ledger.at_peak.get(category, 0) for category in HELD)
        assert held <= parse_budget(budget, lab.geometry.routed_bytes)


@pytest.mark.usefixtures("live")
def test_the_smallest_budget_runs_and_a_smaller_one_is_refused(lab: Lab, subject: Subject) -> None:
    """A budget below one layer's demand for one token (and what the system must hold beside it) is refused in one line
    that says so, before anything runs; the smallest that is not refused runs to its end, live.
    """
    if subject.spec.sizing != "budget":
        pytest.skip(f"{subject.name} has sizing={subject.spec.sizing}: it ignores the budget")
    run = lab.run(subject, SMALLEST)
    least = int(lab.least(subject).removesuffix("B"))
    assert sum(tier.capacity_bytes for tier in run.session.experts.tiers) <= least
    less = least - lab.models["none"].pack.slot_bytes
    for nbytes in (less, 1):
        with pytest.raises(UsageError) as caught:
            lab.start(subject, replace(SMALLEST, budget=f"{nbytes}B"))
        one_line(caught.value)


def test_the_cap_on_memory_holds(lab: Lab, subject: Subject, trace: Trace) -> None:
    """``memory=`` bounds all that a run books, dense weights, predictors and drafts too; what does not fit is refused
    in one line. A system books what it holds with ``Equipment.held_bytes``.
    """
    peak = replayed(lab, subject, trace).session.ledger.peak_bytes
    capped = replay(lab, subject, trace, Audit(), memory=f"{peak + peak // 8}B").session.ledger
    assert capped.peak_bytes == peak
    with pytest.raises(BudgetError) as caught:
        replay(lab, subject, trace, Audit(), memory=f"{peak - 1}B")
    one_line(caught.value)


@pytest.mark.parametrize("batch", [1, 2])
def test_what_was_read_is_what_was_asked_for(lab: Lab, subject: Subject, trace: Trace, batch: int) -> None:
    """Experts read are the demand and prefetch reads of the records, and bytes read theirs: a joined read counts once,
    a cancelled one not at all. A plugin must not write into records; reads come from what its hooks return.
    """
    audit = Audit()
    run = replay(lab, subject, trace, audit, budget="0.3", batch=batch)
    timeline: Any = run.session.timeline
    stored = timeline.storage_bytes - audit.first_bytes
    asked = sum(r.demand_reads + r.prefetch_reads - r.cancelled for r in audit.records)
    there = subject.split and asked > audit.keys_read  # some came up from the host tier
    assert asked == audit.keys_read or there, f"records say {asked} reads, {audit.keys_read} were made"
    booked = sum(r.read_bytes for r in audit.records)
    assert booked == audit.bytes_read, f"records say {booked} bytes, {audit.bytes_read} were read"
    cached = subject.spec.engine is not None  # its engine may read through the page cache
    assert stored == booked or (cached and stored < booked), f"storage delivered {stored} bytes, records say {booked}"
    for record in audit.records:
        for requests, hits, late in zip(record.requests, record.hits, record.late, strict=True):
            assert 0 <= hits + late <= requests, f"pass {record.step.index}: {hits} hits, {late} late of {requests}"


@pytest.mark.usefixtures("live")
def test_experts_in_use_stay(lab: Lab, subject: Subject) -> None:
    """With the fewest slots, two sequences and reads that end late and out of order: what a layer computes on keeps its
    slot and its bytes until it is done. Victims come from ``candidates`` alone; nothing else may free a slot.
    """
    run = lab.run(subject, SMALLEST)
    assert run.audit.records, "no pass was recorded"
