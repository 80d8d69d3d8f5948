"""Killed at any change of a file and at random moments: what stands is whole, the same command ends with the bytes of a
run that nobody disturbed, and nothing of the dead is left, neither files nor locks.
"""

# ruff: noqa: F811 - fixtures are imported

from __future__ import annotations

import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from artefact_fixtures import examples_file, model_folder
from fault_fixtures import TIMES, Server, listing, server, tally  # noqa: F401 - fixture

from moebench import artefact, result

# What an interrupted command goes on from, locks, and the journal of a pack that has just got its name stand in sight.
STATES = (".partial", ".training", ".lock", "journal.jsonl")
CHANGES = 8 * TIMES if TIMES > 1 else 5  # of those that a command makes, evenly spread
KILLS = 4 if TIMES == 1 else 8 * TIMES


@dataclass(frozen=True)
class Command:
    """Words of a command that writes below ``out``; ``timed`` says that its files hold times."""

    name: str
    words: str
    timed: bool = False
    long: bool = False  # for the long form alone

    def __str__(self) -> str:
        return self.name


PACK = "pack model=small byte_layout=plain out=out/p"
PACKS = [
    Command("pack packed", PACK),
    Command("pack checkpoint int8", f"{PACK} layout=checkpoint quant=int8", long=True),
    Command("pack packed rans", f"{PACK} codec=rans"),
]
FITS = [
    Command(
        "prepare edge0",
        "prepare system=edge0 model=small data=sums.jsonl out=out threads=1 rank=2 quant=int8 "
        "steps_distil=2 steps_tune=2 steps_onpolicy=0",
        timed=True,
    ),
    Command("prepare moe_infinity", "prepare system=moe_infinity model=small trace=t.safetensors out=out"),
    Command(
        "prepare bigmomo",
        "prepare system=bigmomo model=small draft=lookup prompts=sums.jsonl requests=2 new_tokens=8 depth=2 out=out",
        long=True,
    ),
]
RUN = (
    "run system=lru hw=m4pro model=mixtral-8x7b quality=none workload.requests=1 workload.prompt_tokens=4 "
    "workload.new_tokens=4 warmup_tokens=1"
)
OTHERS = [
    Command("trace synth", "trace synth model=olmoe-1b-7b sequences=1 prefill=4 decode=4 out=out/t.safetensors"),
    Command("new-system", "new-system fifth out=out/fifth"),
    Command("model random", "model random geometry=tiny.yaml out=out/m"),
    Command("report", "report results=rows out=out", long=True),
    Command("run", f"{RUN} out=out", timed=True),
]


def chosen(commands: list[Command]) -> list[Command]:
    return [command for command in commands if TIMES > 1 or not command.long]


@pytest.fixture(scope="module")
def place(server):
    """The server's folder, with a small model and what the commands read."""
    folder = server.folder
    model_folder(folder / "small", num_experts_per_tok=4, moe_intermediate_size=64)
    examples_file(folder / "sums.jsonl")
    rows = ["layers: 2", "experts: 4", "top_k: 2", "hidden: 64", "intermediate: 64", "vocabulary: 512"]
    (folder / "tiny.yaml").write_text("\n".join(["name: tiny", *rows, "other_parameters: 90000"]) + "\n")
    record = "trace record model=small prompts=sums.jsonl requests=2 new_tokens=8 out=t.safetensors"
    assert server.moebench(*record.split(), warm=True).code == 0
    assert server.moebench(*RUN.split(), "out=rows").code == 0
    return folder


def content(command: Command, out: Path) -> dict[str, str]:
    """Names and bytes of everything below ``out``; of files with times in them, what is the same every time."""
    found = listing(out)
    if command.name == "run":  # each run adds a row; a killed one may have added its own
        for name in [name for name in found if name.endswith(".json")]:
            row = result.load(out / name)
            del found[name]
            if row.status == "ok":  # one that failed is a row too
                found[name.rpartition("-")[0]] = row.id
    elif command.timed:
        for name in [name for name in found if name.endswith(".safetensors") and not name.startswith(".")]:
            header, tensors = artefact.read(out / name)
            header.get("provenance", {}).pop("seconds", None)
            found[name] = json.dumps(header, sort_keys=True) + artefact.digest(tensors)
    return found


def in_sight(command: Command, out: Path) -> dict[str, str]:
    """Of that, what a user takes for finished: no hidden name, no state to go on from, no lock."""

    def finished(name: str) -> bool:
        return not any(part.startswith(".") or part.endswith(STATES) for part in Path(name).parts)

    return {name: held for name, held in content(command, out).items() if finished(name)}


@pytest.fixture
def whole(request, server, place):
    """(command, what it leaves when nobody disturbs it, changes of files it makes)."""
    command = request.param
    fresh(place)
    done = server.moebench(*command.words.split(), warm=True)
    fresh(place)
    done = server.moebench(*command.words.split(), root=place / "out")
    assert done.code == 0, done.err
    assert done.operations >= 3
    return command, content(command, place / "out"), done


def fresh(place: Path) -> Path:
    shutil.rmtree(place / "out", ignore_errors=True)
    (place / "out").mkdir()
    return place / "out"


def check_standing(command: Command, out: Path, expected: dict[str, str]) -> None:
    """What is in sight is a part of the finished whole, each file complete."""
    for name, held in in_sight(command, out).items():
        assert expected.get(name) == held, name


@pytest.mark.parametrize("whole", chosen(PACKS + FITS + OTHERS), ids=str, indirect=True)
def test_a_kill_before_any_change_of_a_file_is_made_good_by_the_same_command(server, place, whole):
    command, expected, done = whole
    count = min(CHANGES, done.operations)
    moments = sorted({1 + round(i * (done.operations - 1) / (count - 1)) for i in range(count)})
    for at in moments:
        out = fresh(place)
        assert server.moebench(*command.words.split(), root=out, die_at=at).code == -9
        check_standing(command, out, expected)
        again = server.moebench(*command.words.split(), root=out)
        assert again.code == 0 or "exists already" in again.error, again.err
        assert content(command, out) == expected, f"killed at change {at}"
    tally("kill at a change", command.name, len(moments), "every rerun ended with the same bytes, nothing left over")


@pytest.mark.parametrize("whole", chosen(PACKS + FITS), ids=str, indirect=True)
def test_kills_at_random_moments_one_after_the_other(server, place, whole):
    command, expected, done = whole
    draw, out, kills, runs = random.Random(command.name), fresh(place), 0, 0
    while kills < KILLS:
        found = server.moebench(*command.words.split(), root=out, seconds=draw.uniform(0.2, 1.0) * done.s)
        check_standing(command, out, expected)
        kills += found.code == -9
        if found.code == 0:
            runs += 1
            assert content(command, out) == expected
            out = fresh(place)
        else:
            assert found.code == -9, found.err
    assert server.moebench(*command.words.split(), root=out).code == 0
    assert content(command, out) == expected
    tally("kill at random", command.name, kills, f"{runs + 1} runs ended with the same bytes, nothing left over")
