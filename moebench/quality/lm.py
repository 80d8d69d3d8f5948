"""A model behind the decode loop as lm-eval sees it, so that its tasks run under any system.

Knows the loop and the tokenizer; knows no task and no system. Needs lm-eval.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from moebench.engine.loop import Loop
from moebench.errors import UsageError
from moebench.quality.batches import batches
from moebench.quality.parity import log_softmax

NEW_TOKENS = 256  # of an answer whose task does not say how long it may be, as in lm-eval's own models
TAIL = 16  # tokens before the last one in which a stop text may have begun, beside its own length


class LoopLM(TemplateLM):
    """Answers lm-eval's requests in their order. The model holds ``max_length`` tokens; up to ``batch`` sequences run
    together. ``decoded``: continuations are decoded token by token after their context, as the system would write
    them; else the whole text runs in passes, as a prompt does.
    """

    def __init__(
        self,
        loop: Loop,
        tokenizer: Any,
        ends: frozenset[int],
        max_length: int,
        vocabulary: int,
        batch: int,
        decoded: bool,
    ) -> None:
        super().__init__()
        self.loop, self.tokenizer, self.ends, self.max_length = loop, tokenizer, ends, max_length
        self.vocabulary, self.batch, self.decoded = vocabulary, batch, decoded

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context."""
        return self.tokenizer.bos_token_id if self.tokenizer.bos_token_id is not None else self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's folder."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as text, by the tokenizer's own template."""
        return self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )  # fmt: skip

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids of a text; special tokens as the tokenizer adds them by itself, unless told, and no second one."""
        prefix = self.tokenizer.bos_token
        if add_special_tokens is None and prefix and string.startswith(prefix):
            add_special_tokens = False
        chosen = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return self.tokenizer(string, **chosen)["input_ids"]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """By request ((context, continuation), ids of the context, of the continuation): the sum of the continuation's
        log-probabilities, and whether each of its tokens is the greedy choice. A context that is too long loses its
        beginning.
        """
        cut = []
        for _texts, context, continuation in requests:
            if len(continuation) > self.max_length:
                raise UsageError(
                    f"a continuation of {len(continuation)} tokens does not fit this model of {self.max_length}"
                )
            room = self.max_length + 1 - len(continuation)  # the last token is predicted, not read
            cut.append((context[-room:], continuation))
        sums, greedy = np.zeros(len(cut)), np.ones(len(cut), bool)
        lengths = [len(context) + len(continuation) for context, continuation in cut]
        for group in batches(lengths, self.batch, self.vocabulary):
            contexts, continuations = zip(*(cut[i] for i in group), strict=True)
            for sequence, index, logits in self.loop.score(contexts, continuations, self.decoded):
                tokens = np.array([continuations[b][i] for b, i in zip(sequence, index, strict=True)])
                where, rows = np.asarray(group)[sequence], np.arange(len(tokens))
                np.add.at(sums, where, log_softmax(logits)[rows, tokens])
                np.logical_and.at(greedy, where, logits.argmax(1) == tokens)
        return list(zip(sums.tolist(), greedy.tolist(), strict=True))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in windows of the model's length, each token predicted once."""
        windows, owners = [], []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for pair in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1):
                windows.append((None, *make_disjoint_window(pair)))
                owners.append(number)
        sums = np.zeros(len(requests))
        scored = self._loglikelihood_tokens(windows)
        np.add.at(sums, np.asarray(owners, np.int64), [value for value, _ in scored])
        return sums.tolist()

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy answers, each up to its first stop text or its length. Requests with the same options share batches.

        A prompt that leaves an answer no room loses its beginning.
        """
        prompts, news, stops = [], [], []
        for request in requests:
            text, options = request.args
            until, new = self._options(options)
            ids = self.tok_encode(text)
            new = min(new, max(self.max_length - len(ids), self.max_length // 4))
            prompts.append(ids[-(self.max_length - new) :])
            news.append(new)
            stops.append(until)
        answers = [""] * len(requests)
        lengths = [len(prompt) + new for prompt, new in zip(prompts, news, strict=True)]
        for kind in dict.fromkeys(zip(news, stops, strict=True)):
            mine = [i for i in range(len(requests)) if (news[i], stops[i]) == kind]
            for picked in batches([lengths[i] for i in mine], self.batch):
                group = [mine[i] for i in picked]
                out = self.loop.generate([prompts[i] for i in group], kind[0], stop=self._stop(kind[1]))
                for i, tokens in zip(group, out.tokens, strict=True):
                    answers[i] = self._text(tokens, kind[1])
        return answers

    def _options(self, options: dict[str, Any]) -> tuple[tuple[str, ...], int]:
        """Stop texts and the most tokens of an answer."""
        if options.get("do_sample") or options.get("num_beams", 1) != 1:
            raise UsageError("a task asks for sampled answers or beams: systems here decode greedily")
        until = options.get("until") or []
        new = options.get("max_gen_toks", options.get("max_new_tokens", NEW_TOKENS))
        return tuple([until] if isinstance(until, str) else until), int(new)

    def _stop(self, until: tuple[str, ...]) -> Any:
        """Whether the ids written so far end the answer."""
        reach = TAIL + max(map(len, until), default=0)

        def ends(tokens: Sequence[int]) -> bool:
            if tokens[-1] in self.ends:
                return True
            tail = self.tokenizer.decode(tokens[-reach:]) if until else ""
            return any(text in tail for text in until)

        return ends

    def _text(self, tokens: Sequence[int], until: tuple[str, ...]) -> str:
        """An answer without what ended it."""
        ids = list(tokens[:-1]) if tokens and tokens[-1] in self.ends else list(tokens)
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return min((text.split(stop)[0] for stop in until if stop), key=len, default=text)
