"""What a system executes and answers, live: the declared fidelity, in numerics in which equal means equal."""

from __future__ import annotations

import numpy as np
import pytest

from moebench.errors import UsageError
from moebench.testing.lab import Answer, Arrangement, Lab
from moebench.testing.subject import Subject

pytestmark = pytest.mark.usefixtures("live")

SHUFFLED = (("reorder", 3), ("delay_s", 0.0002), ("short_read", 0.2), ("threads", 3))
PLAIN = Arrangement("a third, page cache")
SMALLEST = Arrangement("smallest legal budget, reads short, late and shuffled", "least", faults=SHUFFLED)
ROOMY = Arrangement("everything fits, direct", "1.0", "direct")
ALONE = Arrangement("one request, half of the experts fit", "0.5", batches=((0,),))
AMONG = Arrangement("after others and beside one, modeled clock", clock="virtual", batches=((1,), (0,), (1, 0)))
SPECIAL = (  # what some systems refuse
    Arrangement("entropy-coded, io_uring", engine="uring", codec="rans"),
    Arrangement("two tiers", "0.5", "mmap", device_budget="0.5"),
    Arrangement("two tiers, entropy-coded, modeled clock", "0.5", codec="rans", clock="virtual", device_budget="0.5"),
)


def named(arrangements: tuple[Arrangement, ...]) -> pytest.MarkDecorator:
    """A test for each arrangement."""
    return pytest.mark.parametrize("how", arrangements, ids=str)


@named((PLAIN, SMALLEST, ROOMY))
def test_answers_depend_on_the_request_alone(lab: Lab, subject: Subject, how: Arrangement) -> None:
    """Tokens and logits are, bit for bit, those of everything resident (exact, advisory) or the system's own with
    room for all experts (altered), for any budget, engine and order in which reads end.

    An exact system that differs executes other experts or weights than the router's (see
    ``test_native_routing_is_executed``), or computes on the wrong bytes. An altered one that differs chooses by what is
    resident or by the clock: say so with ``SystemSpec(timing_dependent=True)``, or choose by the request alone.
    """
    check_answers(lab, subject, how)


@named(SPECIAL)
def test_answers_hold_in_arrangements_that_a_system_may_refuse(lab: Lab, subject: Subject, how: Arrangement) -> None:
    """The same with compressed experts and with two tiers; a system that cannot says why in one line."""
    try:
        lab.run(subject, how)
    except UsageError as error:
        pytest.skip(f"{subject.name} refuses: {one_line(error)}")
    check_answers(lab, subject, how)


def check_answers(lab: Lab, subject: Subject, how: Arrangement) -> None:
    """Compare a run's answers with those that they must equal."""
    run = lab.run(subject, how)
    if subject.dependent:
        pytest.skip(f"{subject.name} says that what it executes depends on what is resident: answers may differ")
    reference = lab.resident() if subject.native else lab.run(subject, ROOMY)
    for (number, prompt), answer in run.answers.items():
        check_same(answer, reference.answers[0, prompt], f"{how}: request {prompt} of batch {number}")


def check_same(found: Answer, wanted: Answer, where: str) -> None:
    """Equal tokens, and equal bits of the logits behind each; none of them NaN."""
    assert np.isfinite(found.logits).all(), f"{where}: logits are not finite, something computed on poisoned memory"
    for at, (one, two) in enumerate(zip(found.tokens, wanted.tokens, strict=True)):
        assert one == two, f"{where}: token {at} is {one}, not {two}"
        assert np.array_equal(found.logits[at], wanted.logits[at]), f"{where}: logits behind token {at} differ"


def one_line(error: Exception) -> str:
    """The error's text, which is one line."""
    text = str(error)
    assert len(text.splitlines()) == 1, f"an error of {len(text.splitlines())} lines: {text}"
    return text


@named((PLAIN, SMALLEST))
def test_native_routing_is_executed(lab: Lab, subject: Subject, how: Arrangement) -> None:
    """An exact or advisory system leaves experts and weights of every row as the router chose them.

    ``route`` must return None or the very routing, and must not write into ``native``. A system that executes anything
    else declares ``fidelity=lambda config: "altered"``.
    """
    if not subject.native:
        pytest.skip(f"{subject.name} declares that it alters routing")
    run = lab.run(subject, how)
    assert not run.audit.altered, (
        f"{subject.name} declares {subject.fidelity} and executed another routing at {run.audit.altered}"
    )


def test_what_is_routed_ahead_was_staged(lab: Lab, subject: Subject) -> None:
    """A routing that is decided ahead of its layer names experts that are resident or on their way: staged is routed.

    Otherwise its prediction saves nothing: each miss is waited for as if nobody had predicted.
    """
    if not lab.run(subject, PLAIN).audit.routed.events:
        pytest.skip(f"{subject.name} decides no routing ahead")
    run = lab.run(subject, ALONE)
    assert not run.audit.unstaged, f"routed ahead, neither resident nor on its way: {run.audit.unstaged}"


def test_requests_do_not_depend_on_each_other(lab: Lab, subject: Subject) -> None:
    """The answer to a request is the same alone, beside another, and after others.

    What belongs to a request is forgotten in ``begin_request``; what a row gets depends on its own sequence only
    (``step.sequence``), never on the row number or on its neighbours.
    """
    if subject.dependent:
        pytest.skip(f"{subject.name} says that what it executes depends on what is resident: answers may differ")
    beside = lab.run(subject, PLAIN).answers
    for (number, prompt), answer in lab.run(subject, AMONG).answers.items():
        check_same(answer, beside[0, prompt], f"request {prompt} in batch {number} of {AMONG.batches}")
