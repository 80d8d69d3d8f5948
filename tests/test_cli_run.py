"""Wrong words are one line with the valid choices and exit code 2, before anything runs; results land under out."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from test_result_files import make_row

import moebench
import moebench.api
from moebench import harness
from moebench.cli import main
from moebench.config import QualityConfig, RunConfig, WorkloadConfig
from moebench.errors import UsageError
from moebench.plugins import load_plugins
from moebench.result import load


@pytest.fixture(autouse=True)
def ran(monkeypatch, tmp_path):
    """Run in an empty folder, with no foreign plugins and a harness that only remembers what it was asked for."""
    monkeypatch.setenv("MOEBENCH_PLUGINS", "")
    monkeypatch.setenv("MOEBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    configs: list[RunConfig] = []

    def run(config: RunConfig, strict: bool = True):
        if config.seed == 13:
            raise OSError("the disk is gone")
        if config.seed == 14:
            raise KeyboardInterrupt
        configs.append(config)
        lost = config.seed == 15 or (config.seed == 16 and config.system == "resident")
        failed = {"status": "failed", "error": "boom"} if lost else {}
        return [make_row(system=config.system, config=config.resolved(), **failed)]

    def run_arms(arms, workers=0):
        for at, arm in enumerate(arms):
            if arm.number == 0:
                yield at, run(arm.config)
            else:
                yield at, []

    monkeypatch.setattr(harness, "run", run)
    monkeypatch.setattr(harness, "run_arms", run_arms)
    return configs


def one_line(capsys) -> str:
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert line.startswith("moebench: error: ")
    assert "Traceback" not in line
    return line


@pytest.mark.parametrize(
    ("words", "hints"),
    [
        (["sytem=lru"], ["did you mean system?", "budget", "workload"]),
        (["system=sluru"], ["did you mean slru?", "belady"]),
        (["-m", "system=lru,sluru"], ["did you mean slru?"]),
        (["hw=m4por"], ["did you mean m4pro?", "rtx5090_32gb", "home/hardware/NAME.yaml"]),
        (["workload=synth"], ["synthetic", "prompts", "trace"]),
        (["workload.request=1"], ["did you mean requests?", "new_tokens"]),
        (["system=slru", "system.protectd=1"], ["did you mean protected?"]),
        (["system=lru", "system.protected=0.5"], ["option of system lru 'protected'", "valid: none"]),
        (["-m", "system=slru,lru", "system.protected=0.5"], ["option of system lru 'protected'"]),
        (["system=slru", "system.protected=much"], ["protected=much", "a number"]),
        (["repeats=two"], ["repeats=two", "a whole number"]),
        (["repeats=1.5"], ["a whole number"]),
        (["repeats=0"], ["at least 1"]),
        (["repeats=true"], ["a whole number"]),
        (["seed=[1]"], ["a whole number"]),
        (["quant=int3"], ["int4, int8, none"]),
        (["mode=guess"], ["auto, measure, model"]),
        (["workload.kind=odd"], ["synthetic, prompts, trace"]),
        (["budget=3"], ["3GiB", "fraction"]),
        (["budget=lots"], ["3GiB"]),
        (["memory=6"], ["GiB"]),
        (["workload=trace"], ["workload.path="]),
        (["warmup_tokens=500"], ["new_tokens"]),
        (["system=lru,slru"], ["-m"]),
        (["lru"], ["KEY=VALUE", "system"]),
        (["+foo=1"], ["not added"]),
        (["system={a:"], ["error"]),
        (["system.id=lru"], ["system=NAME"]),
        (["~hydra.job"], ["not added or removed"]),
        (["hydra.job.nme=1"], ["nme"]),
        ([f"memory={'9' * 300}GiB"], ["8 EiB"]),
        ([f"budget={'9' * 400}GiB"], ["8 EiB"]),
        (["order=a.safetensors"], ["layout=ordered"]),
        (["-m", "seed=1,2", "repeats=0,1"], ["seed=1 repeats=0: ", "at least 1"]),
        (["--fast"], ["--fast", "--cfg job"]),
        (["--config-name", "foo"], ["config_name", "valid: backend, budget"]),
        (["--config-dir=."], ["config_dir", "valid: backend, budget"]),
        (["--resolve"], ["--resolve", "-m, --cfg job, --info"]),
        (["--cfg", "jobs"], ["jobs", "-m, --cfg job, --info"]),
    ],
)
def test_wrong_words_are_one_line_and_nothing_runs(words, hints, ran, capsys):
    assert main(["run", *words]) == 2
    line = one_line(capsys)
    for hint in hints:
        assert hint in line
    assert not ran
    assert not Path("results").exists()


@pytest.mark.parametrize("command", [["run"], ["run", "-m", "seed=1,2"], ["compare", "systems=lru"]])
@pytest.mark.parametrize("place", ["/proc/x", "file/below"])
def test_a_place_that_cannot_be_written_is_refused_before_anything_runs(command, place, ran, capsys):
    Path("file").write_text("")
    assert main([*command, f"out={place}"]) == 2
    assert f"out={place}" in one_line(capsys)
    assert not ran


def test_showing_the_job_makes_no_folder(ran):
    assert main(["run", "--cfg", "job", "out=here"]) == 0
    assert main(["run", "--info", "out=here"]) == 0
    assert not ran
    assert not Path("here").exists()


def test_a_run_prints_table_then_document_and_writes_one_file(ran, capsys):
    assert main(["run", "system=slru", "system.protected=0.7", "budget=0.15", "quality=none", "out=here"]) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    document = json.loads(lines[-1])
    assert [row["system"] for row in document["rows"]] == ["slru"]
    assert "TTFT" in shown.out
    (config,) = ran
    assert (config.system, config.knobs.protected, config.budget, config.quality.suite) == (
        "slru", 0.7, "0.15", "none"
    )  # fmt: skip
    (file,) = Path("here").glob("m4pro/*/*.json")
    assert load(file).config["system"] == {"id": "slru", "protected": 0.7}
    assert {path.name for path in Path().iterdir()} <= {"here", "home"}
    assert not list(Path().rglob("*.log"))


def test_defaults_are_those_of_the_dataclass(ran):
    assert main(["run"]) == 0
    (config,) = ran
    for entry in dataclasses.fields(RunConfig):
        if entry.default is not dataclasses.MISSING and entry.name != "knobs":
            assert getattr(config, entry.name) == entry.default, entry.name
    assert config.workload == WorkloadConfig()


def test_every_option_reaches_the_run(ran):
    given = {
        "budget": "3.0GiB",
        "device_budget": "0.5",
        "codec": "rans",
        "memory": "6GiB",
        "quant": "none",
        "layout": "ordered",
        "engine": "mmap",
        "order": "a.safetensors",
        "stack": "native",
        "numerics": "fast",
    }
    given |= {
        "backend": "mlx",
        "mode": "model",
        "scope": "per_layer",
        "quality": QualityConfig("local", limit=3),
        "repeats": 3,
        "warmup_tokens": 2,
        "chunk": 8,
        "seed": 5,
        "depth": 4,
        "threads": 3,
        "device": "cuda",
    }
    given |= {"model": "./some/folder", "out": "there", "debug": True, "hw": "m2_16gb"}
    words = [f"{key}={str(value).lower() if value is True else value}" for key, value in given.items()]
    words = [word for word in words if not word.startswith("quality")] + ["quality=local", "quality.limit=3"]
    load_words = ["workload=prompts", "workload.batch=2", "workload.seed=9", "workload.requests=7"]
    assert main(["run", "system=decayed_lfu", *words, *load_words]) == 0
    (config,) = ran
    assert {key: getattr(config, key) for key in given} == given
    assert (config.workload.kind, config.workload.batch, config.workload.seed, config.workload.requests) == (
        "prompts",
        2,
        9,
        7,
    )
    untested = {f.name for f in dataclasses.fields(RunConfig)} - set(given) - {"system", "knobs", "workload"}
    assert not untested


def test_a_sweep_runs_every_combination_and_prints_one_document(ran, capsys):
    assert main(["run", "-m", "system=lru,slru", "budget=0.1,0.2"]) == 0
    assert [(c.system, c.budget) for c in ran] == [("lru", "0.1"), ("lru", "0.2"), ("slru", "0.1"), ("slru", "0.2")]
    lines = capsys.readouterr().out.splitlines()
    assert len(json.loads(lines[-1])["rows"]) == 4
    assert sum(line.startswith("{") for line in lines) == 1


@pytest.mark.parametrize("at", [0, 1, 2])
def test_flags_may_stand_anywhere(at, ran):
    words = ["system=lru,slru", "budget=0.2"]
    assert main(["run", *words[:at], "-m", *words[at:]]) == 0
    assert [(config.system, config.budget) for config in ran] == [("lru", "0.2"), ("slru", "0.2")]


def test_one_failure_in_a_sweep_keeps_the_other_rows(ran, capsys):
    assert main(["run", "-m", "seed=1,13,2"]) == 1
    shown = capsys.readouterr()
    assert len(json.loads(shown.out.splitlines()[-1])["rows"]) == 2
    assert [line for line in shown.err.splitlines() if "the disk is gone" in line] == [
        "moebench: error: seed=13: the disk is gone"
    ]


def test_every_failure_of_a_sweep_is_told_with_its_words(ran, capsys):
    assert main(["run", "-m", "seed=13", "chunk=8,16", "debug=true"]) == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out.splitlines()[-1])["rows"] == []
    told = [line for line in shown.err.splitlines() if line.startswith("moebench: error")]
    assert told == [f"moebench: error: seed=13 chunk={chunk} debug=True: the disk is gone" for chunk in (8, 16)]
    assert shown.err.count("Traceback") == 2


def test_a_failed_run_is_one_line_and_exit_code_1(capsys):
    assert main(["run", "seed=13"]) == 1
    assert "the disk is gone" in one_line(capsys)


def test_a_failed_row_is_printed_and_exit_code_1(capsys):
    assert main(["run", "seed=15"]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows"][0]["error"] == "boom"


def test_debug_shows_the_traceback(capsys):
    assert main(["run", "seed=13", "debug=true"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_ctrl_c_is_one_line(capsys):
    assert main(["run", "seed=14"]) == 1
    assert "Ctrl-C" in one_line(capsys)


def test_the_composed_job_can_be_shown_without_running(ran, capsys):
    before = list(sys.argv)
    assert main(["run", "--cfg", "job", "system=slru"]) == 0
    text = capsys.readouterr().out
    assert "protected: 0.8" in text
    assert "budget: '0.25'" in text
    assert not ran
    assert sys.argv == before


def test_a_comparison_carries_floor_baselines_and_oracle(ran, capsys):
    assert main(["compare", "systems=slru", "slru.protected=0.5", "budget=0.2"]) == 0
    systems = [config.system for config in ran]
    assert "belady" in systems
    assert systems[-1] == "slru"
    assert ran[-1].knobs.protected == 0.5
    assert {config.budget for config in ran} == {"0.2"}
    assert len(set(systems)) == len(systems)
    assert len(json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]) == len(systems)


def test_only_the_systems_that_were_asked_for_decide_the_exit_code(ran, capsys):
    assert main(["compare", "systems=slru", "seed=16"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert {row["system"]: row["error"] for row in rows if row["status"] == "failed"} == {"resident": "boom"}
    assert main(["compare", "systems=slru,resident", "seed=16"]) == 1
    assert main(["compare", "systems=all", "seed=16"]) == 1


def test_all_stands_for_every_system_and_none_runs_twice(ran):
    assert main(["compare", "systems=all"]) == 0
    assert sorted(config.system for config in ran) == sorted(load_plugins().systems)


def test_a_comparison_from_python_takes_one_name_and_nested_options(ran):
    moebench.compare("slru", baselines=False, workload={"requests": 1, "name": "a 'b'/c"}, seed=3)
    (config,) = ran
    assert (config.system, config.seed) == ("slru", 3)
    assert (config.workload.requests, config.workload.name) == (1, "a 'b'/c")


@given(st.text() | st.booleans() | st.none() | st.integers() | st.text(alphabet="\\'\"${}, a"))
@example("a\\")
@example("${out}")
@example("007")
def test_any_keyword_value_survives_hydras_grammar(value):
    (word,) = moebench.api._words({"workload": {"name": value}})
    override = OverridesParser.create().parse_override(word)
    assert override.key_or_group == "workload.name"
    assert OmegaConf.to_container(OmegaConf.create({"x": override.value()}), resolve=True)["x"] == value


def test_the_help_lists_every_option(capsys):
    assert main(["run", "--help"]) == 0
    text = capsys.readouterr().out
    nested = {"workload": WorkloadConfig, "quality": QualityConfig}
    for entry in dataclasses.fields(RunConfig):
        if entry.name != "knobs" and entry.name not in nested:
            assert f"  {entry.name}=" in text
            assert entry.metadata["help"] in text
    for head, cls in nested.items():
        for entry in dataclasses.fields(cls):
            assert f"  {head}.{entry.name}=" in text


def test_a_comparison_without_baselines_runs_what_was_asked(ran):
    assert main(["compare", "systems=lru,slru", "baselines=false"]) == 0
    assert [config.system for config in ran] == ["lru", "slru"]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["systems=lru,slur"], "did you mean slru?"),
        (["baselines=false"], "systems=a,b"),
        ([], "systems=a,b or systems=all"),
        (["systems="], "systems=a,b or systems=all"),
        (["system=lru"], "systems=a,b"),
        (["systems=lru", "baselines=false", "slru.protected=1"], "slru is not compared"),
        (["systems=slru", "slru.protectd=1"], "did you mean protected?"),
        (["systems=lru", "baseline=false"], "did you mean baselines?"),
        (["systems=lru,mmap", "codec=rans"], "codec=rans has no meaning"),
        (["systems=lru,mmap", "device_budget=0.5"], "device_budget=0.5 has no meaning"),
    ],
)
def test_wrong_words_of_a_comparison_are_one_line(words, hint, ran, capsys):
    assert main(["compare", *words]) == 2
    assert hint in one_line(capsys)
    assert not ran


def test_a_workload_that_contradicts_itself_is_refused():
    with pytest.raises(UsageError, match="no effect"):
        WorkloadConfig(kind="synthetic", path="x")
