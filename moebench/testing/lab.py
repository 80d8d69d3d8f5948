"""Runs a system live on the embedded model: on poisoned memory, under an audit, in any arrangement, in limited time.

Loads the model once. Knows sessions and packs; knows no system and decides nothing.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from moebench.engine.loop import Loop
from moebench.errors import UsageError
from moebench.harness.assets import load_live, read_prompts, with_drafter
from moebench.harness.passes import RECORDING, DemandLog
from moebench.harness.plan import EMBEDDED, Cell, embedded_folder, plan
from moebench.harness.session import Session, open_session
from moebench.plugins import load_plugins
from moebench.systemspec import Equipment, Target
from moebench.testing.audit import Audit
from moebench.testing.packs import contents, poisoned
from moebench.testing.subject import Subject

PROMPT, CHUNK = 12, 8  # tokens of the longer prompt, and of a pass over it
FOLDER = Path(str(resources.files("moebench.models.tinymoe")))


@dataclass(frozen=True)
class Arrangement:
    """How a run is set up. ``budget`` may be ``least``, the smallest legal one; ``faults`` are options of the
    ``faulty`` engine around ``engine``.
    """

    name: str
    budget: str = "0.35"
    engine: str = "pread"
    codec: str = "none"
    clock: str = "wall"
    device_budget: str = "auto"
    faults: tuple[tuple[str, float], ...] = ()
    batches: tuple[tuple[int, ...], ...] = ((0, 1),)  # prompts that run side by side, one batch after another
    tokens: int = 6  # of an answer

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False)
class Answer:
    """What one request got: token ids, and the logits [n, V] behind each."""

    tokens: list[int]
    logits: np.ndarray


@dataclass(eq=False)
class Run:
    """A finished run: answers by (batch, prompt), its audit and session, what the system counted."""

    answers: dict[tuple[int, int], Answer]
    audit: Audit
    session: Session
    report: dict[str, Any] = field(default_factory=dict)


class Lab:
    """The embedded model behind one backend for each codec; ``seconds`` is the limit of one run."""

    def __init__(self, folder: Path, seconds: float) -> None:
        from moebench.backends.torch_model import TorchBackend

        self.registry, self.seconds = load_plugins(), seconds
        self.models, self.backends = {}, {}
        for codec in ("none", "rans"):
            live = load_live(embedded_folder(), EMBEDDED, "int4", "packed", "", codec)
            pack = poisoned(live.pack, folder / codec)
            self.models[codec] = replace(live, pack=pack)
            self.backends[codec] = TorchBackend(
                pack, pack.dense_path, live.config, attention="eager", numerics="row_invariant"
            )
        self.geometry, self.truth = self.models["none"].geometry, contents(self.models["none"].pack)
        texts = read_prompts(FOLDER / "tasks" / "prompts.jsonl", 2, 0)
        tokenizer = self.models["none"].tokenizer
        self.prompts = [tokenizer(text)["input_ids"][: PROMPT - 5 * i] for i, text in enumerate(texts)]
        self.kept: dict[tuple[Subject, Arrangement], Run] = {}
        self._least: dict[Subject, str] = {}
        self._plans: dict[tuple[Any, ...], Cell] = {}
        self._equipped: dict[tuple[Subject, str], tuple[Equipment, Any]] = {}
        spec = self.registry.system("resident")
        self.reference = Subject(spec, spec.config(), "moebench")

    def target(self, codec: str = "none") -> Target:
        """The embedded model as a system sees it before a live run."""
        model, backend = self.models[codec], self.backends[codec]
        known = (model.pack.manifest.model["weights_hash"], model.config, backend.selection_bias())
        return Target(EMBEDDED, model.geometry, *known, trees=backend.trees)

    def run(self, subject: Subject, how: Arrangement) -> Run:
        """A live run, made once for each arrangement; raises ``UsageError`` where the system refuses it."""
        if (subject, how) not in self.kept:
            self.kept[subject, how] = self.fresh(subject, how)
        return self.kept[subject, how]

    def fresh(self, subject: Subject, how: Arrangement, audit: Audit | None = None, *observers: object) -> Run:
        """The same anew, whatever ran before."""
        with deadline(self.seconds, f"{subject.name}, {how}"):
            return self._run(subject, how, audit or Audit(self.truth), observers)

    def resident(self) -> Run:
        """The model with all experts in memory: what exact systems must equal."""
        return self.run(self.reference, REFERENCE)

    def _run(self, subject: Subject, how: Arrangement, audit: Audit, observers: Sequence[object]) -> Run:
        cell, future = self.cell(subject, how), None
        if subject.foresees:
            log = DemandLog()
            first = self._open(subject, replace(cell, spec=RECORDING), how, [log])
            try:
                self._answers(first, how)
            finally:
                first.close()
            future = log.demands
        session = self._open(subject, cell, how, [*observers, audit], future)
        try:
            audit.attach(session, self.backends[how.codec].ops)
            answers = self._answers(session, how)
            audit.finish()
            return Run(answers, audit, session, session.hooks.report())
        finally:
            session.close()

    def planned(self, subject: Subject, **options: Any) -> Cell:
        """The cell of a configuration, refused as ``moebench run`` would refuse it."""
        key = (subject, *options.items())
        if key not in self._plans:
            self._plans[key] = plan(subject.config(chunk=CHUNK, **options), self.registry)[0]
        return self._plans[key]

    def cell(self, subject: Subject, how: Arrangement) -> Cell:
        """The cell of an arrangement."""
        part = "0.5" if subject.split and how.device_budget == "auto" else how.device_budget
        cell = self.planned(subject, hw=subject.hw, codec=how.codec, device_budget=part)
        workload = replace(cell.config.workload, batch=max(map(len, how.batches)))
        budget = self.least(subject) if how.budget == "least" else how.budget
        config = replace(cell.config, budget=budget, workload=workload)
        return replace(cell, config=config, clock=how.clock, engine=subject.spec.engine or how.engine)

    def equipped(self, subject: Subject, codec: str) -> tuple[Equipment, Any]:
        """What the system brings to the model, and the model with its drafter; once, as for all sessions of a cell."""
        if (subject, codec) not in self._equipped:
            equipment = subject.spec.equip(subject.knobs, self.target(codec))
            model = with_drafter(self.models[codec], self.backends[codec], equipment.draft)
            self._equipped[subject, codec] = equipment, model
        return self._equipped[subject, codec]

    def start(self, subject: Subject, how: Arrangement) -> None:
        """Set a run up and leave it: raises what it would raise before its first request."""
        self._open(subject, self.cell(subject, how), how, future=[] if subject.foresees else None).close()

    def least(self, subject: Subject) -> str:
        """The smallest budget under which the system starts: found by trying, to one slot."""
        if subject not in self._least:
            pack = self.models["none"].pack

            def starts(slots: int) -> bool:
                try:
                    self.start(subject, Arrangement("least", budget=f"{slots * pack.slot_bytes}B"))
                except UsageError:
                    return slots > 2 * pack.keys  # whatever keeps it from starting then, it is not the budget
                return True

            low, high = 0, self.geometry.top_k
            while not starts(high):
                low, high = high, 2 * high
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if starts(middle) else (middle, high)
            self._least[subject] = f"{high * pack.slot_bytes}B"
        return self._least[subject]

    def _open(
        self, subject: Subject, cell: Cell, how: Arrangement, observers: Sequence[object] = (), future: Any = None
    ) -> Session:
        backend = self.backends[how.codec]
        equipment, model = self.equipped(subject, how.codec)
        backend.adapt(equipment.adapters)
        engines: Any = self.registry
        if how.faults:
            wrapped = partial(self.registry.engine("faulty"), inner=cell.engine, **dict(how.faults))
            engines = SimpleNamespace(engine=lambda name: wrapped)
        return open_session(
            cell, model.geometry, engines, pack=model.pack, dense_bytes=backend.dense_bytes, dense_bits=16.0,
            kv_bytes=backend.kv_bytes, future=future, observers=observers, batch=cell.config.workload.batch,
            context=PROMPT + how.tokens, longest_prompt=PROMPT, equipment=equipment, ops=backend.ops,
            drafter=model.drafter,
        )  # fmt: skip

    def _answers(self, session: Session, how: Arrangement) -> dict[tuple[int, int], Answer]:
        loop, found = Loop(self.backends[how.codec], session.experts, CHUNK), {}
        for number, batch in enumerate(how.batches):
            out = loop.generate([self.prompts[i] for i in batch], how.tokens, keep_logits=True)
            for row, prompt in enumerate(batch):
                tokens = out.tokens[row]
                logits = np.stack([out.logits[i][row] for i in range(len(tokens))])
                found[number, prompt] = Answer(tokens, logits)
        session.experts.drain()
        return found


REFERENCE = Arrangement("everything resident", budget="1.0")


@contextmanager
def deadline(seconds: float, what: str) -> Iterator[None]:
    """Fail what takes longer, even while it waits for a read; only the main thread can be stopped so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_: object) -> None:
        raise AssertionError(f"{what}: no end after {seconds:g} s")

    before: Callable[..., object] | int | None = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)  # again, should its end hang too
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
