"""A clock that jumps, descriptors that run out under a measured run, and memory that does: as ever, or one line."""

# ruff: noqa: F811 - fixtures are imported

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fault_fixtures import TIMES, listing, server, tally  # noqa: F401 - fixture
from harness_fixtures import make_host
from test_faults_kills import FITS, OTHERS, PACKS, content, fresh, place, whole  # noqa: F401 - fixtures

ROOT = Path(__file__).parents[1]
TRACE = ROOT / "results" / "baseline" / "traces" / "tinymoe.safetensors"
MEASURED = f"run system=lru hw=host model=tinymoe quality=none workload=trace workload.path={TRACE} out=rows"
long = pytest.mark.skipif(TIMES == 1, reason="part of the long form, make faults")


@pytest.fixture(scope="module")
def home(server):
    """Home of the server, on a known machine, with the pack of the measured replay."""
    make_host(server.folder / "home")
    assert server.moebench(*MEASURED.split()).code == 0
    return server.folder / "home"


@long
@pytest.mark.parametrize("whole", [PACKS[0], FITS[0], OTHERS[0], OTHERS[-1]], ids=str, indirect=True)
def test_a_clock_that_jumps_changes_nothing(server, place, whole):
    command, expected, _ = whole
    out = fresh(place)
    done = server.do("fault_fixtures:jumping", command.words.split())
    assert done.code == 0, done.err
    assert content(command, out) == expected
    tally("jumping clock", command.name, 1, "the same bytes")


@long
def test_times_are_measured_on_a_clock_that_does_not_jump(server, home):
    done = server.do("fault_fixtures:jumping", MEASURED.split())
    assert done.code == 0, done.err
    (row,) = json.loads(done.out.splitlines()[-1])["rows"]
    for name in ("decode_tok_s", "tpot_p50_ms", "ttft_s", "stall_ms_per_token"):
        if (value := row["metrics"][name]["value"]) is not None:
            assert 0 <= value < 1e5, (name, value)
    tally("jumping clock", "measured replay", 1, "times within what they may be")


@long
@pytest.mark.parametrize("limit", [5, 6, 7, 8, 9, 10, 12])
def test_a_measured_run_without_descriptors_is_one_line(server, home, limit):
    before = listing(home / "packs")
    found = server.moebench(*MEASURED.split(), limits={"RLIMIT_NOFILE": limit})
    if found.code:
        assert found.code == 1
        assert "Too many open files" in found.error
    assert listing(home / "packs") == before
    assert server.moebench(*MEASURED.split()).code == 0
    tally("RLIMIT_NOFILE", f"measured replay, {limit}", 1, "done" if not found.code else "one line")


@long
@pytest.mark.parametrize("mib", [300, 540, 580, 800])
def test_memory_that_runs_out_is_one_line_and_the_pack_stays(server, home, mib):
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from cgroups import Limits, group, refusal

    limits = Limits(memory=mib << 20)
    if (why := refusal(limits)) is not None:
        pytest.skip(why)
    before = listing(home / "packs")
    environ = {**os.environ, "MOEBENCH_HOME": str(home), "MOEBENCH_PLUGINS": "", "OMP_NUM_THREADS": "1"}
    with group(limits) as inside:
        words = inside.command([sys.executable, "-m", "moebench.cli", *MEASURED.split()])
        found = subprocess.run(words, capture_output=True, text=True, env=environ, cwd=server.folder, check=False)
    assert "Traceback" not in found.stderr
    assert found.returncode in (0, 1, -9), found.stderr  # -9: the command itself was ended, which nobody can tell of
    if found.returncode == 1:
        assert "killed by signal 9" in found.stdout + found.stderr
    assert listing(home / "packs") == before
    assert server.moebench(*MEASURED.split()).code == 0
    said = {0: "done", 1: "a failed row", -9: "the command was ended"}[found.returncode]
    tally("memory cgroup", f"measured replay, {mib} MiB", 1, f"{said}; the next run was right")
