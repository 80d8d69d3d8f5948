"""What a suite's mean is a mean of: its tasks, each counting the same, or groups of tasks that count as one.

Knows the suites that ship with moebench; of any other suite every task is a member.
"""

from __future__ import annotations

from collections.abc import Collection

from moebench.quality import local
from moebench.quality.catalog import opencompass5

OPENCOMPASS5 = "opencompass5"


def members(suite: str, tasks: Collection[str]) -> dict[str, list[str]]:
    """Each member's tasks among ``tasks``, in the suite's order; none where it is missing. A member that is a group of
    lm-eval's (``mmlu_pro``) has the tasks that begin with its name.
    """
    if suite in local.ITEMS:
        names = list(local.TASKS)
    elif suite == OPENCOMPASS5:
        names = [entry["task"] for entry in opencompass5()]
    else:
        return {name: [name] for name in sorted(tasks)}
    return {
        name: [name] if name in tasks else [task for task in sorted(tasks) if task.startswith(f"{name}_")]
        for name in names
    }
