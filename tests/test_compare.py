"""A comparison is the same whoever runs beside whom; a process that dies costs its row, Ctrl-C what is not done yet."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest
from harness_fixtures import SHORT, make_host, mini, plugin  # noqa: F401

import moebench
from moebench import harness
from moebench.commands import compose
from moebench.config import RunConfig
from moebench.errors import MoebenchError
from moebench.harness import compare, figures
from moebench.harness.isolate import each
from moebench.harness.repeats import one_row
from moebench.plugins import load_plugins
from moebench.result import Row

WORDS = ["hw=m4pro", "model=mini", "budget=0.4", "quality=none", *(f"{key}={value}" for key, value in SHORT.items())]
SYSTEM = """
import os, signal, time
from moebench.hookspecs import hookimpl
from moebench.systemspec import SystemSpec

class Bad:
    @hookimpl
    def acquired(self, keys, ready):
        {act}

@hookimpl
def register_systems(register):
    register(SystemSpec(id="bad", title="", summary="", make=lambda config, run: Bad()))
"""
HANG = 'open("hangs.new", "w").write(str(os.getpid())); os.rename("hangs.new", "hangs"); time.sleep(600)'


def configs_of(*systems: str, more: tuple[str, ...] = ()) -> list[RunConfig]:
    registry = load_plugins()
    compose.register_groups(registry)
    found = []
    for system in systems:
        (job,) = compose.jobs([f"system={system}", *WORDS, *more], registry, sweep=False)
        found.append(compose.resolve(job, registry))
    return found


def run_all(configs: list[RunConfig], workers: int) -> dict[str, Row]:
    arms = harness.arms(configs, load_plugins())
    with closing(harness.run_arms(arms, workers)) as coming:
        return {rows[0].system: rows[0] for _, rows in coming}


def fixed(row: Row) -> str:
    """The bytes of a row that do not depend on the moment: all but the volatile block and the source's commit."""
    plain = dataclasses.asdict(row)
    del plain["volatile"], plain["environment"]["commit"]
    return json.dumps(plain, sort_keys=True)


def test_side_by_side_one_after_another_and_alone_give_the_same_bytes(mini):  # noqa: F811
    configs = configs_of("ondemand", "slru", "random", "belady", "specprefetch")
    alone = {config.system: fixed(harness.run(config)[0]) for config in configs}
    for workers in (1, 2):
        assert {system: fixed(row) for system, row in run_all(configs, workers).items()} == alone


@pytest.mark.parametrize(("act", "how"), [("os._exit(3)", "exit code 3"), ("os.kill(os.getpid(), 9)", "signal 9")])
def test_a_process_that_dies_costs_its_own_row_only(act, how, mini, plugin):  # noqa: F811
    plugin("bad", SYSTEM.format(act=act))
    rows = run_all(configs_of("bad", "lru", "slru", "lfu"), 1)  # the one process is replaced by another
    assert {system: row.status for system, row in rows.items()} == {
        "bad": "failed", "lru": "ok", "slru": "ok", "lfu": "ok",
    }  # fmt: skip
    assert how in rows["bad"].error


def test_what_a_system_raises_is_a_row_and_its_process_goes_on(mini, plugin):  # noqa: F811
    plugin("bad", SYSTEM.format(act='raise RuntimeError("no such expert")'))
    rows = run_all(configs_of("bad", "lru"), 1)
    assert "no such expert" in rows["bad"].error
    assert rows["lru"].status == "ok"


def test_from_python_the_table_has_the_same_rows_in_order(mini):  # noqa: F811
    options = {"model": "mini", "hw": "m4pro", "budget": "0.4", "quality": "none", **SHORT}
    table = moebench.compare(["slru", "lru"], baselines=False, **options)
    assert list(table["system"]) == ["slru", "lru"]
    alone = moebench.run(system="lru", **options)[0]
    assert table.set_index("system").loc["lru", "decode_tok_s"] == alone.metrics["decode_tok_s"].value


def pid_of(seconds: float) -> int:
    """Who runs a task that takes a moment."""
    time.sleep(seconds)
    return os.getpid()


def refuse(_: int) -> None:
    raise MoebenchError("not this one")


def test_no_more_processes_than_asked_for_and_none_is_left():
    found = dict(each(pid_of, [(0.05,)] * 6, 2))
    assert sorted(found) == list(range(6))
    assert len(set(found.values())) <= 2
    assert not any(os.path.exists(f"/proc/{pid}") for pid in found.values())
    assert [str(error) for _, error in each(refuse, [(0,), (1,)], 2)] == ["not this one"] * 2
    assert list(each(pid_of, [], 2)) == []


def test_giving_up_half_way_leaves_no_process():
    with closing(each(pid_of, [(0.0,), (600.0,), (600.0,)], 2)) as coming:
        _, pid = next(coming)
    assert not os.path.exists(f"/proc/{pid}")
    assert not subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "args="], capture_output=True, text=True,
                              check=False).stdout.count("moebench.harness.isolate")  # fmt: skip


def stopped(tmp_path: Path, send) -> subprocess.CompletedProcess:
    """A comparison of a quick system and one that hangs, to which ``send`` happens when only that one is left."""
    words = ["compare", "systems=lru,bad", "baselines=false", *WORDS, "workers=1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "moebench.cli", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while not Path("hangs").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        send(process.pid)
        out, told = process.communicate(timeout=60)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(words, process.returncode, out, told)


@pytest.mark.parametrize(
    "send",
    [lambda pid: os.killpg(pid, signal.SIGINT), lambda pid: os.kill(pid, signal.SIGTERM)],
    ids=["ctrl-c", "kill"],
)
def test_a_stopped_comparison_prints_what_is_done_and_says_what_is_missing(send, mini, plugin, tmp_path):  # noqa: F811
    plugin("bad", SYSTEM.format(act=HANG))
    done = stopped(tmp_path, send)
    assert done.returncode == 130
    lines = done.stdout.splitlines()
    assert [row["system"] for row in json.loads(lines[-1])["rows"]] == ["lru"]
    assert any(line.split()[:1] == ["lru"] for line in lines)
    assert "stopped: 1 not run: bad on mini" in lines
    assert "Traceback" not in done.stderr
    assert not os.path.exists(f"/proc/{Path('hangs').read_text()}")
    assert [path.parent.name for path in Path("results").glob("*/*/*.json")] == ["lru__mini__synthetic"]


def test_measured_arms_take_turns_and_each_becomes_one_row(mini, tmp_path, monkeypatch):  # noqa: F811
    make_host(tmp_path / "home")
    configs = configs_of("lru", "slru", "lfu", more=("hw=host", "repeats=3", "quality=quick"))
    (template,) = harness.run(configs_of("lru")[0])
    asked: list[tuple[str, str]] = []

    def isolated(work, config, number, strict, quiet):
        asked.append((config.system, config.quality.suite))
        if config.system == "slru":
            raise MoebenchError("it died")
        turn = float(len(asked))
        found = {n: dataclasses.replace(m, value=m.value and turn) for n, m in template.metrics.items()}
        plain = {**config.resolved(), "engine": "direct", "model": "mini"}
        return dataclasses.replace(
            template, system=config.system, metrics=found, config=plain, volatile={"seconds": 1.5}
        )

    monkeypatch.setattr(compare, "isolated", isolated)
    rows = run_all(configs, 0)
    assert asked == [
        ("lru", "quick"), ("slru", "quick"), ("lfu", "quick"),
        ("lru", "none"), ("lfu", "none"), ("lru", "none"), ("lfu", "none"),
    ]  # fmt: skip
    assert rows["slru"].error == "it died"
    lru = rows["lru"]
    assert lru.metrics["decode_tok_s"].samples == (1.0, 4.0, 6.0)
    assert (lru.metrics["decode_tok_s"].value, lru.metrics["decode_tok_s"].ci) == (4.0, (1.0, 6.0))
    assert lru.metrics["peak_active_gib"].value == 6.0
    assert (lru.config["repeats"], lru.protocol["repeats"], lru.protocol["interleaved"]) == (3, 3, True)
    assert lru.config["quality"]["suite"] == "quick"
    assert lru.volatile["seconds"] == 4.5


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_repeats_of_many_processes_are_put_together_as_those_of_one(count, mini, monkeypatch):  # noqa: F811
    sessions = []
    speed = figures.speed
    monkeypatch.setattr(figures, "speed", lambda cell, runs: sessions.append((cell, *runs)) or speed(cell, runs))
    rows = []
    for seed in range(count):
        (config,) = configs_of("random", more=(f"seed={seed}",))
        rows += harness.run(config)
    together = speed(sessions[0][0], [session for _, session in sessions])
    merged = one_row(rows)
    assert {name: merged.metrics[name] for name in together} == together


@pytest.mark.parametrize(("free_gib", "processors", "want"), [(64, 2, 2), (64, 16, 16), (3.5, 16, 3), (0.5, 8, 1)])
def test_as_many_at_a_time_as_processors_and_memory_allow(free_gib, processors, want, mini, monkeypatch):  # noqa: F811
    monkeypatch.setattr(compare, "processors", lambda: processors)
    memory = type("Memory", (), {"available": int(free_gib * 2**30), "total": 2**36})()
    monkeypatch.setattr(compare.psutil, "virtual_memory", lambda: memory)
    assert compare.side_by_side(harness.arms(configs_of("lru"), load_plugins())) == want


def test_a_model_of_ones_own_takes_room_for_itself_and_the_unmodified_one(tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").touch()
    os.truncate(tmp_path / "model.safetensors", 10 * 2**30)
    monkeypatch.setattr(compare, "processors", lambda: 16)
    memory = type("Memory", (), {"available": 45 * 2**30})()
    monkeypatch.setattr(compare.psutil, "virtual_memory", lambda: memory)
    cell = type("Cell", (), {"folder": tmp_path})()
    arm = type("Arm", (), {"cell": cell})()
    assert compare.side_by_side([arm]) == 2


def test_help_is_one_page_without_the_option_it_refuses(capsys):
    from moebench.cli import main

    assert main(["compare", "systems=edge0", "--help"]) == 0
    text = capsys.readouterr().out
    assert text.count("usage:") == 1
    assert "  system=" not in text
    assert "  systems=" in text
    assert "  budget=" in text
    assert "  edge0.k=" in text
