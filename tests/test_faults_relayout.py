"""BigMoMo killed while it re-organises storage: the pack stays as it was, every expert of the copy can be recovered,
and the next run finds nothing in its way.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from fault_fixtures import TIMES, Server, listing, tally
from harness_fixtures import make_host
from read_fixtures import NO_URING, READERS, check_all

from moebench.store.engines import StoreError
from moebench.store.overlay import JOURNAL, Overlay, remove_dead
from moebench.store.pack import Pack
from moebench.store.swap_journal import SIZE

TRACE = Path(__file__).parents[1] / "results" / "baseline" / "traces" / "tinymoe-bigmomo.safetensors"
KILLS = 4 if TIMES == 1 else 8 * TIMES


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    made = Server(tmp_path_factory.mktemp("faults"), "moebench.commands.compose", "moebench.harness.run")
    yield made
    made.close()


@pytest.fixture(scope="module")
def home(server):
    """Home of a server whose machine is known, with the pack that the runs read."""
    make_host(server.folder / "home")
    assert run(server, "direct", warm=True).code == 0
    return server.folder / "home"


def run(server: Server, engine: str, **order):
    """A measured replay in which experts change places as often as they can."""
    options = {
        "system": {"id": "bigmomo", "history": 4}, "hw": "host", "model": "tinymoe", "budget": "0.3", "engine": engine,
        "workload": {"kind": "trace", "path": str(TRACE)}, "quality": {"suite": "none"},
    }  # fmt: skip
    return server.do("fault_fixtures:measured", options, **order)


def left_over(home: Path) -> list[Path]:
    return [path for path in (home / "overlays").iterdir() if path.is_dir()]


def examine(home: Path, pack: Pack, before: dict[str, str]) -> str:
    """What a killed run left: ``none``, ``begun`` (the copy), ``still`` or ``torn`` (a swap); checked and removed."""
    assert listing(pack.path) == before
    found, state = left_over(home), "none"
    for folder in found:
        records = (folder / JOURNAL).stat().st_size // SIZE if (folder / JOURNAL).is_file() else 0
        if not records:
            state = "begun"
            with pytest.raises(StoreError, match=r"not finished|no journal"):
                Overlay.recover(folder, pack)
            continue
        state = "still" if records % 2 else "torn"  # the first record, then two for each swap
        check_all(overlay := Overlay.recover(folder, pack))
        overlay.close()
    assert len(found) <= 1
    remove_dead(home / "overlays")
    assert not left_over(home)
    return state


@pytest.mark.parametrize("engine", ["direct"] if TIMES == 1 else [*READERS, *(["uring"] if NO_URING is None else [])])
def test_kills_at_random_moments_leave_the_pack_and_a_copy_that_can_be_recovered(server, home, engine):
    (path,) = (home / "packs").glob("random-tinymoe-*none")
    pack, before = Pack.open(path), listing(path)
    whole = run(server, engine)
    assert whole.code == 0, whole.err
    assert json.loads(whole.out)["counters"]["swaps"] > 5
    draw, states = random.Random(engine), []
    while len(states) < KILLS:
        found = run(server, engine, seconds=draw.uniform(0.1, 1.0) * whole.s)
        if found.code == -9:
            states.append(examine(home, pack, before))
    again = run(server, engine)
    assert again.code == 0, again.err
    assert not left_over(home)
    counts = ", ".join(f"{states.count(state)} {state}" for state in ("none", "begun", "still", "torn"))
    tally("kill at random", f"bigmomo re-organising, {engine}", KILLS, f"copies left: {counts}; all recovered")


def test_a_kill_within_a_swap_is_recovered(server, home):
    (path,) = (home / "packs").glob("random-tinymoe-*none")
    pack, before = Pack.open(path), listing(path)
    whole = run(server, "pread", root=home / "overlays")
    assert whole.code == 0, whole.err
    draw, states = random.Random(0), []
    while len(states) < KILLS:  # how many swaps a run makes is a matter of time
        found = run(server, "pread", root=home / "overlays", die_at=draw.randint(1, whole.operations))
        if found.code:
            assert found.code == -9, found.err
            states.append(examine(home, pack, before))
    assert "torn" in states
    counts = ", ".join(f"{states.count(state)} {state}" for state in ("none", "begun", "still", "torn"))
    tally("kill at a change", "bigmomo re-organising, pread", KILLS, f"copies left: {counts}; all recovered")
