"""Storage that fails, lies and dawdles: the right answer or one clear error, and an end."""

from __future__ import annotations

import pytest

from moebench.errors import MoebenchError
from moebench.store.engines import StoreError
from moebench.testing.lab import Arrangement, Lab
from moebench.testing.subject import Subject
from moebench.testing.test_answers import PLAIN, ROOMY, check_same, named, one_line

pytestmark = pytest.mark.usefixtures("live")

FAULTS = (
    Arrangement("reads that fail now and then", faults=(("eio", 0.002), ("seed", 1))),
    Arrangement("reads that often fail", faults=(("eio", 0.2), ("seed", 2))),
    Arrangement("bits that flip", faults=(("bit_flip", 0.05), ("seed", 3), ("reorder", 2))),
)


@named(FAULTS)
def test_faults_end_in_the_right_answer_or_an_error(lab: Lab, subject: Subject, how: Arrangement) -> None:
    """A failed demand raises one line that names file, expert and offset; a failed prefetch harms nobody. Nothing ends
    in other numbers, in a hang, or in an error that a hook swallowed; and nothing of it is left for the next run.
    """
    try:
        run = lab.fresh(subject, how)
    except (StoreError, MoebenchError) as error:
        one_line(error)
        if how is not FAULTS[1]:
            return
        run = lab.fresh(subject, PLAIN)  # what failed left nothing behind
    if subject.dependent:
        pytest.skip(
            f"{subject.name} says that what it executes depends on what is resident: it ended, no more is known"
        )
    reference = lab.resident() if subject.native else lab.run(subject, ROOMY)
    for (_, prompt), answer in run.answers.items():
        check_same(answer, reference.answers[0, prompt], f"{how}: request {prompt}")
