"""``moebench report``: the command of each row gives that row again, bad files are named, old tables go."""

from __future__ import annotations

import dataclasses
import json
import shlex

import pytest
from harness_fixtures import SHORT, mini, plugin  # noqa: F401 - fixtures
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from report_fixtures import failed, row

from moebench import machine, result
from moebench.cli import main
from moebench.commands import compose
from moebench.commands.command_line import command, words
from moebench.harness.plan import plan
from moebench.plugins import load_plugins

LETTERS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1, max_size=12)
NAMES = LETTERS | st.sampled_from(["true", "null", "007", "1e3", "0.50", "nan", "${oc.env:HOME}", "a,b", "it's", "\\"])


@pytest.fixture(scope="module")
def registry():
    found = load_plugins()
    compose.register_groups(found)
    return found


def planned(given: list[str], registry) -> list[dict]:
    """What rows of these words would hold as their configuration."""
    (job,) = compose.jobs(given, registry, sweep=False)
    cells = plan(compose.resolve(job, registry), registry)
    found = [{**cell.config.resolved(), "engine": cell.engine, "model": cell.model} for cell in cells]
    return json.loads(json.dumps(found))


@pytest.mark.parametrize(
    "given",
    [
        ["system=lru"],
        ["system=edge0", "system.k=3", "system.lora=false", "model=tinymoe", "quality=local"],
        ["system=bigmomo", "hw=snapdragon_8_elite_gen5", "model=qwen3-30b-a3b", "chunk=16"],
        ["system=flashmoe", "engine=pread", "workload.requests=2", "workload.new_tokens=40", "warmup_tokens=4"],
        ["system=mmap", "layout=checkpoint", "budget=0.02", "numerics=fast", "mode=model"],
        ["system=slru", "workload=prompts", "workload.path='/some where/it''s.jsonl'", "model=tinymoe"],
        ["system=lru", "workload=trace", "workload.path=/tmp/a b", "model=qwen3.6-35b-a3b"],
        ["system=ssd_llama", "hw=rtx5090_32gb", "model=kimi-k2.7-code", "budget=40GiB", "stack=auto"],
        ["system=lru", "quality=quick", "quality.limit=3", "layout=ordered", "device_budget=0.5"],
    ],
)
def test_the_command_of_a_row_plans_the_same_cell(given, registry):
    for config in planned([word.replace("''", r"\'") for word in given], registry):
        again = words(config, registry)
        assert planned(again, registry) == [config]
        shorter = [part for part in again if not part.startswith(("system=", "hw=", "model="))]
        for left_out in shorter:  # each word is needed
            try:
                other = planned([part for part in again if part != left_out], registry)
            except ValueError:
                continue
            assert other != [config], left_out


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(NAMES)
def test_any_name_survives_the_shell_and_the_grammar(registry, name):
    config = {**row("lru").config, "workload": {"kind": "synthetic", "name": name}}
    (word,) = [
        word for word in shlex.split(command(row("lru", config=config), registry)) if word.startswith("workload.")
    ]
    (override,) = OverridesParser.create().parse_overrides([word])
    assert (
        str(OmegaConf.create({"name": override.value()}).name) == name
    )  # an option that is text takes numbers as such


def test_the_command_in_a_report_gives_the_same_row_again(mini, tmp_path, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setattr(machine, "_commit", lambda: "the same commit")
    given = [f"{key}={value}" for key, value in SHORT.items()]
    given += ["system=slru", "model=mini", "hw=m4pro", "budget=0.4", "quality=none", "workload.seed=3", "out=a"]
    assert main(["run", *given]) == 0
    assert main(["report", "results=a", "out=b"]) == 0
    (line,) = [line for line in (tmp_path / "b/report.md").read_text().splitlines() if "moebench run system=" in line]
    text = line.split("|")[2].strip()
    assert main([*shlex.split(text)[1:], "out=c"]) == 0
    first, second = ([path.name for path in (tmp_path / out).rglob("*.json")] for out in ("a", "c"))
    assert first == second != []


def test_the_last_line_names_the_files_and_a_table_of_an_older_report_goes(tmp_path, capsys):
    result.write(row("lru"), tmp_path / "r")
    result.write(failed("lfu"), tmp_path / "r")
    out = tmp_path / "out"
    (out / "report.tables").mkdir(parents=True)
    (out / "report.tables/old.csv").write_text("x\n")
    assert main(["report", f"results={tmp_path / 'r'}", f"out={out}"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["rows"] == 2
    assert told["failed"] == 1
    assert sorted(told["files"]) == sorted(str(path) for path in out.rglob("*") if path.is_file())


def test_the_same_files_give_the_same_bytes(tmp_path):
    for system in ("lru", "slru", "belady"):
        result.write(row(system), tmp_path / "r")
    for out in ("a", "b"):
        assert main(["report", f"results={tmp_path / 'r'}", f"out={tmp_path / out}"]) == 0
    for file in (tmp_path / "a").rglob("*.*"):
        if file.is_file():
            assert file.read_bytes() == (tmp_path / "b" / file.relative_to(tmp_path / "a")).read_bytes()


def test_files_that_are_no_results_are_named_in_the_report_and_on_stderr(tmp_path, capsys):
    whole = result.write(row("lru"), tmp_path / "r")
    text = whole.read_text()
    (tmp_path / "r/cut.json").write_text(text[:100])
    (tmp_path / "r/foreign.json").write_text('{"name": "something else"}')
    (tmp_path / "r/newer.json").write_text(text.replace('"schema": 1', '"schema": 99'))
    (tmp_path / "r/edited.json").write_text(text.replace('"budget": "0.25"', '"budget": "0.5"'))
    older = dataclasses.replace(row("lru"), metrics={}, volatile={"finished": "2020"})
    result.write(older, tmp_path / "r")
    assert main(["report", f"results={tmp_path / 'r'}", f"out={tmp_path / 'out'}"]) == 0
    warned, page = capsys.readouterr().err, (tmp_path / "out/report.html").read_text()
    left_out = page[page.index('id="omitted"') :]
    for name in ("cut.json", "foreign.json", "newer.json", "edited.json"):
        assert name in warned
        assert name in left_out
    assert older.id in left_out


def test_no_results_is_one_line_that_says_how_to_make_some(tmp_path, capsys):
    (tmp_path / "r").mkdir()
    for where in (tmp_path / "r", tmp_path / "nothing"):
        assert main(["report", f"results={where}", f"out={tmp_path / 'out'}"]) == 2
        told = capsys.readouterr().err.strip()
        assert told.count("\n") == 0
        assert "moebench run" in told
    assert not (tmp_path / "out").exists()


def test_a_place_that_cannot_be_written_is_one_line(tmp_path, capsys):
    result.write(row("lru"), tmp_path / "r")
    (tmp_path / "out").write_text("a file")
    assert main(["report", f"results={tmp_path / 'r'}", f"out={tmp_path / 'out'}"]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_rows_of_machines_and_systems_unknown_here_are_reported(tmp_path):
    result.write(row("from_elsewhere", hw="their_box"), tmp_path / "r")
    assert main(["report", f"results={tmp_path / 'r'}", f"out={tmp_path / 'out'}"]) == 0
    page = (tmp_path / "out/report.html").read_text()
    assert "from_elsewhere" in page
    assert "their_box: unknown hardware" in page
    assert "moebench run system=from_elsewhere hw=their_box" in page


def test_published_figures_stand_beside_the_row_they_belong_to(registry, tmp_path):
    for spec in registry.systems.values():
        for found in spec.published:
            given = [f"system={spec.id}", f"hw={found.hw}", f"model={found.model}"]
            (config,) = planned(given, registry)
            result.write(row(spec.id, model=found.model, hw=found.hw, config=config), tmp_path / "r")
    assert main(["report", f"results={tmp_path / 'r'}", f"out={tmp_path / 'out'}"]) == 0
    page = (tmp_path / "out/report.html").read_text()
    assert "edge0 (published)" in page
    assert "20.4 †" in page
