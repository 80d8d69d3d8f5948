"""The unmodified model's side of a comparison: all that is asked of it, as one value of arrays.

``answer`` is a pure function of a model folder's files and a suite; what it returns may be kept and used for every
system that is compared on them (``Native.arrays`` and ``Native.of`` are its written form). Knows no system.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moebench.engine.loop import Loop
from moebench.quality import parity
from moebench.quality.parity import TextScores
from moebench.quality.scores import TaskScores
from moebench.quality.suites import Suite

CHUNK = 256  # prompt tokens of a pass


@dataclass(frozen=True, eq=False)
class Native:
    """The unmodified model's scores by task, and its predictions on the held-out text."""

    tasks: Mapping[str, TaskScores]
    text: TextScores

    def arrays(self) -> dict[str, np.ndarray]:
        """All of it as arrays of numbers and texts by name; ``of`` is the inverse."""
        found = {f"text/{name}": array for name, array in self.text.arrays().items()}
        for name, task in self.tasks.items():
            found[f"task/{name}/scores"] = task.scores
            found[f"task/{name}/items"] = np.array(task.items)
            found[f"task/{name}/about"] = np.array([task.version, task.metric, task.mode])
        return found

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> Native:
        """The value that ``arrays`` wrote."""
        names = [key.removeprefix("task/").removesuffix("/scores") for key in arrays if key.endswith("/scores")]
        tasks = {}
        for name in names:
            items, about = (arrays[f"task/{name}/{part}"].tolist() for part in ("items", "about"))
            version, measure, mode = about
            tasks[name] = TaskScores(version, measure, mode, tuple(items), arrays[f"task/{name}/scores"])
        text = {key.removeprefix("text/"): array for key, array in arrays.items() if key.startswith("text/")}
        return cls(tasks, TextScores(**text))


def answer(folder: Path, suite: Suite) -> Native:
    """Ask the model of ``folder``, in bf16 with all experts held, everything that ``suite`` asks."""
    from moebench.backends.torch_model import NativeTorchBackend
    from moebench.checkpoint.whole import load_whole

    loop = Loop(NativeTorchBackend(load_whole(folder, "bfloat16")), None, CHUNK)
    return Native(suite.run(loop, decoded=False), parity.predict(loop, suite.text(), suite.vocabulary, suite.batch))
