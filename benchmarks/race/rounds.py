"""Rounds of the race: what is to be done, what was done, and one step after another between them.

A step is one round of one routing law under one limit: its arms in shuffled order, fio between them. What a step found
is written when it is over, so a race that was stopped goes on with the step it was in. Knows no figure.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from moebench.budget import parse_bytes
from moebench.config import option
from moebench.errors import UsageError
from race import machine
from race.files import LAWS, Files

HERE = Path(__file__).parent
ARMS = ("ssd_llama", "lru", "ssd_llama/checkpoint", "llama.cpp", "accelerate")
LOG = "rounds.jsonl"
VOCABULARY = 8192


@dataclass(frozen=True)
class Race:
    """What is raced."""

    folder: str = field(metadata={"help": "folder of the files, four times the model; kept, so that a race goes on"})
    layers: int = option(24, "layers of the model; each has 128 experts of 2.5 MiB")
    rounds: int = option(3, "rounds")
    limits: tuple[str, ...] = option(("1.5GiB", "3GiB"), "memory that an arm's process is held to, page cache included")
    beside: str = option("0.9GiB", "what of a limit moebench's arms leave for everything but experts")
    warmup: int = option(16, "decoded tokens before counting starts")
    tokens: int = option(32, "decoded tokens that count")
    arms: tuple[str, ...] = option(ARMS, "arms, by name")
    words: tuple[str, ...] = option((), "further words of moebench run for its own arms, such as engine=uring,depth=8")
    llama_python: str = option(sys.executable, "a Python that has llama-cpp-python")
    llama_threads: int = option(2, "threads of llama.cpp and of accelerate")
    accelerate_python: str = option(sys.executable, "a Python that has torch, transformers and accelerate")
    accelerate_layers: int = option(24, "layers of accelerate's model; its rate is scaled to those of the others")
    accelerate_tokens: int = option(3, "decoded tokens that count, of accelerate, after one")

    def __post_init__(self) -> None:
        if unknown := [name for name in self.arms if name not in ARMS]:
            raise UsageError(f"arms={unknown[0]} is not one of {', '.join(ARMS)}")
        for name in ("layers", "rounds", "tokens", "accelerate_layers", "accelerate_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")
        for limit in self.limits:
            if parse_bytes(limit, "limits") <= parse_bytes(self.beside, "beside"):
                raise UsageError(f"limits={limit} leaves nothing for experts beside beside={self.beside}")

    @property
    def files(self) -> Files:
        """Where everything lies."""
        return Files(Path(self.folder).expanduser(), self.layers)

    @property
    def home(self) -> Path:
        """moebench's own folder in this race."""
        return self.files.folder / "home"

    def settings(self) -> dict[str, Any]:
        """What must be equal when a race goes on."""
        found = json.loads(json.dumps(asdict(self)))
        return {key: found[key] for key in found if key not in ("folder", "rounds")}


@dataclass(frozen=True)
class Step:
    """One round of one law under one limit."""

    round: int
    law: str
    limit: str


class Log:
    """The records so far, in a file whose first line holds the settings."""

    def __init__(self, race: Race) -> None:
        self.path, settings = race.files.folder / LOG, race.settings()
        if self.path.is_file():
            first, *rest = [json.loads(line) for line in self.path.read_text().splitlines()]
            if changed := sorted(key for key in settings if first.get(key) != settings[key]):
                raise UsageError(f"{self.path} was begun with another {', '.join(changed)}; remove it to begin anew")
            self.records: list[dict[str, Any]] = rest
        else:
            self.records = []
            self._write([settings])

    def add(self, records: list[dict[str, Any]]) -> None:
        """Keep what a step found, all or nothing."""
        self.records += records
        self._write(records)

    def _write(self, lines: list[dict[str, Any]]) -> None:
        text = self.path.read_text() if self.path.is_file() else ""
        whole = self.path.with_suffix(".partial")
        whole.write_text(text + "".join(json.dumps(line) + "\n" for line in lines))
        os.replace(whole, self.path)


def left(race: Race, records: list[dict[str, Any]]) -> Iterator[Step]:
    """The steps that are not done yet, in order."""
    done = {(r["round"], r["law"], r["limit"]) for r in records}
    for number in range(race.rounds):
        for limit in race.limits:
            for law in random.Random(f"{number} {limit}").sample(LAWS, len(LAWS)):
                if (number, law, limit) not in done:
                    yield Step(number, law, limit)


def run(race: Race, step: Step, say: Any) -> list[dict[str, Any]]:
    """All arms of a step in shuffled order, fio before and after each."""
    from moebench.store.pack import Pack

    order = [arm for arm in race.arms if arm != "accelerate" or step.law == LAWS[0]]  # it loads all, however routed
    random.Random(f"{step.round} {step.law} {step.limit}").shuffle(order)
    pack = Pack.open(race.files.pack(step.law, "packed"))
    passes, records = [], []
    for number, arm in enumerate(order):
        if not passes:
            passes.append(machine.fio(pack.file_path, pack.slot_bytes, step.round))
        machine.drop_caches()
        found = one(race, step, arm)
        passes.append(machine.fio(pack.file_path, pack.slot_bytes, step.round + number + 1))
        say(f"round {step.round} {step.law} {step.limit} {arm}: {found.get('error') or format(found['tok_s'], '.3g')}")
        records.append({**found, **asdict(step), "arm": arm, "fio": passes[-2:]})
    return records


def one(race: Race, step: Step, arm: str) -> dict[str, Any]:
    """One arm in a process of its own."""
    if arm == "llama.cpp":
        return _llama(race, step)
    if arm == "accelerate":
        return _accelerate(race, step)
    system, _, layout = arm.partition("/")
    limit = parse_bytes(step.limit, "limits")
    task = {
        "pack": str(race.files.pack(step.law, layout or "packed")), "model": str(race.files.model), "system": system,
        "budget": f"{limit - parse_bytes(race.beside, 'beside')}B", "warmup": race.warmup,
        "tokens": tokens(race.warmup + race.tokens), "words": dict(word.split("=", 1) for word in race.words),
    }  # fmt: skip
    from moebench.harness.isolate import WAITING

    environment = {**WAITING, "MOEBENCH_HOME": str(race.home), "MOEBENCH_PLUGINS": ""}
    return machine.child([sys.executable, str(HERE / "moebench_arm.py"), json.dumps(task)], limit, environment)


def tokens(decoded: int) -> list[int]:
    """Token ids for so many decode steps: the first is the prompt, the last is never an input; the same in all arms."""
    return np.random.default_rng(0).integers(0, VOCABULARY, decoded + 2).tolist()


def _llama(race: Race, step: Step) -> dict[str, Any]:
    race.files.route_gguf(step.law)
    machine.drop_caches()
    with machine.small_readahead(race.files.gguf) as path:
        task = {
            "gguf": str(path), "threads": race.llama_threads, "warmup": race.warmup,
            "tokens": tokens(race.warmup + race.tokens),
        }  # fmt: skip
        command = [race.llama_python, str(HERE / "llama_arm.py"), json.dumps(task)]
        return machine.child(command, parse_bytes(step.limit, "limits"), {})


def _accelerate(race: Race, step: Step) -> dict[str, Any]:
    limit = parse_bytes(step.limit, "limits")
    task = {
        "folder": str(race.files.offload), "memory": limit - parse_bytes(race.beside, "beside"), "warmup": 1,
        "threads": race.llama_threads, "tokens": tokens(race.accelerate_tokens)[: 1 + race.accelerate_tokens],
    }  # fmt: skip
    command = [race.accelerate_python, str(HERE / "accelerate_arm.py"), json.dumps(task)]
    found = machine.child(command, limit, {})
    if "error" not in found:
        scale = found["layers"] / race.layers
        found |= {"tok_s_own": found["tok_s"], "tok_s": found["tok_s"] * scale, "mb_token": found["mb_token"] / scale}
    return found
