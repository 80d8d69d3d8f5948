"""Which suite a name means, and what every suite can do. Knows names and options; asks nothing itself."""

from __future__ import annotations

import importlib.util
from typing import Any, Protocol

from moebench.config import QualityConfig
from moebench.errors import UsageError
from moebench.quality.parity import Pairs
from moebench.quality.scores import TaskScores

LIBRARY = "lm_eval"


class Suite(Protocol):
    """Questions for a model, the same ones every time."""

    name: str
    harness: str  # what asks and scores
    key: str  # hex digits over everything that is asked and how it is scored
    longest: int  # tokens of the longest prompt and answer together
    vocabulary: int  # tokens that the model can write
    batch: int  # sequences that run together, at most

    def run(self, loop: Any, decoded: bool) -> dict[str, TaskScores]:
        """Ask a model behind ``loop``. ``decoded``: a choice is scored as the system would write it, token by token
        after the prompt; else in passes like a prompt's.
        """

    def text(self) -> Pairs:
        """Held-out text to predict."""


def open_suite(
    config: QualityConfig, tokenizer: Any, ends: frozenset[int], max_length: int, vocabulary: int
) -> Suite | None:
    """The suite that ``config`` names, None for none. The model holds ``max_length`` tokens of ``vocabulary``;
    those in ``ends`` end an answer.

    Raises one line for a task that does not exist, for data that cannot be reached, and where lm-eval is missing.
    """
    if config.suite == "none":
        return None
    if config.suite == "quick":
        from moebench.quality.local import LocalSuite

        return LocalSuite(config, tokenizer, ends, vocabulary)
    if importlib.util.find_spec(LIBRARY) is None:
        raise UsageError(
            f"quality={config.suite} runs on lm-eval: pip install 'moebench[quality]' (quick needs nothing)"
        )
    from moebench.quality.harness import HarnessSuite

    return HarnessSuite(config, tokenizer, ends, max_length, vocabulary)
