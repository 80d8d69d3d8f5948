"""``moebench ladder``: what systems declare, what is refused, a rung that fails, and a real one that loses nothing."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest
from quality_fixtures import answered
from test_result_files import make_row

from moebench.cli import main
from moebench.commands import ladder as command
from moebench.config import RunConfig
from moebench.errors import UsageError
from moebench.harness.ladder import rungs_of
from moebench.plugins import load_plugins
from moebench.systemspec import Rung, Target

TARGET = Target("tinymoe", SimpleNamespace(top_k=4))


@pytest.fixture
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("MOEBENCH_PLUGINS", "")
    monkeypatch.setenv("MOEBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def registry(home):
    return load_plugins()


def climb(registry, system: str, **knobs) -> list[Rung]:
    spec = registry.system(system)
    return list(spec.ladder(spec.config(**knobs), TARGET))


# --- what systems declare --------------------------------------------------------------------------------------------


def test_every_ladder_leads_to_what_was_asked_for_and_steps_onto_rungs_that_exist(registry):
    for name, spec in registry.systems.items():
        rungs = climb(registry, name)
        assert spec.config() in [rung.knobs for rung in rungs]
        for number, rung in enumerate(rungs):
            assert isinstance(rung.knobs, spec.config)
            assert rung.after is None or 0 <= rung.after < number
            assert bool(rung.name and rung.change) == bool(number)


def test_a_system_that_alters_nothing_has_nothing_but_quantisation(registry):
    for name, spec in registry.systems.items():
        if spec.fidelity(spec.config()) != "altered":
            assert climb(registry, name) == [Rung(spec.config())]


def test_edge0_changes_one_thing_a_rung(registry):
    rungs = climb(registry, "edge0", fill="eager", artefact="own")
    knobs = [(r.knobs.k, r.knobs.prerouter, r.knobs.lora, r.knobs.artefact) for r in rungs]
    assert knobs == [
        (4, False, False, ""),
        (0, False, False, ""),
        (0, True, False, "own"),
        (0, True, True, "own"),
        (0, False, True, "own"),
    ]
    assert [rung.after for rung in rungs] == [None, None, None, None, 1]
    assert [rung.repairs for rung in rungs] == [False, False, False, True, False]
    assert rungs[2].knobs.fill == rungs[3].knobs.fill == "eager"


@pytest.mark.parametrize(
    ("knobs", "names"),
    [
        ({"k": 4}, ["", "replaced routing", "adapters", "adapters, native routing"]),
        ({"lora": False, "artefact": "distilled"}, ["", "smaller K", "replaced routing"]),
        ({"prerouter": False}, ["", "smaller K", "adapters"]),
        ({"prerouter": False, "lora": False}, ["", "smaller K"]),
    ],
)
def test_edge0_leaves_out_what_its_options_do_not_change(registry, knobs, names):
    assert [rung.name for rung in climb(registry, "edge0", **knobs)] == names
    if "k" in knobs:
        assert climb(registry, "edge0", **knobs)[-1].after == 0


def test_bigmomo_is_exact_until_it_drops_experts(registry):
    spec = registry.system("bigmomo")
    first, last = climb(registry, "bigmomo", tau=0.1, rho=1.0, artefact="own")
    assert [spec.fidelity(rung.knobs) for rung in (first, last)] == ["exact", "altered"]
    assert dataclasses.replace(first.knobs, tau=0.1, artefact="own") == last.knobs


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["quality=none"], "quality=none"),
        (["model=qwen3-30b-a3b"], "qwen3-30b-a3b is a geometry"),
        (["format=pdf"], "markdown"),
        (["sytem=lru"], "did you mean system?"),
        (["system=edge0", "system.kk=2"], "kk"),
        (["quality=quick", "budget=10KiB"], "budget"),
        (["-m", "system=lru"], "-m"),
    ],
)
def test_wrong_use_is_one_line(home, capsys, words, hint):
    assert main(["ladder", *words]) == 2
    err = capsys.readouterr().err.strip().splitlines()[-1]
    assert hint in err
    assert "Traceback" not in err


def test_a_ladder_that_steps_onto_what_is_not_there_is_refused(registry):
    spec = registry.system("lru")
    broken = dataclasses.replace(spec, ladder=lambda config, target: (Rung(config), Rung(config, "up", "x", after=1)))
    registry.systems["lru"] = broken
    with pytest.raises(UsageError, match="'up'"):
        rungs_of(RunConfig("lru", "m4pro", spec.config()), registry)


# --- the command -----------------------------------------------------------------------------------------------------


def run(words, capsys) -> tuple[int, str, dict]:
    code = main(["ladder", *words])
    out = capsys.readouterr().out.strip().splitlines()
    return code, "\n".join(out[:-1]), json.loads(out[-1])


def test_one_rung_that_fails_leaves_the_others_and_is_said(home, capsys, monkeypatch):
    asked = []

    def fake(config, strict):
        asked.append(config)
        if config.knobs.prerouter and not config.knobs.lora:
            return [make_row(system="edge0", status="failed", error="the disk is full", config=config.resolved())]
        return [answered("edge0", len(asked) % 3, config={**config.resolved(), "model": "tinymoe"})]

    monkeypatch.setattr(command, "run_cell", fake)
    code, text, document = run(["system=edge0", "budget=0.5"], capsys)
    assert code == 1
    assert {config.quality.suite for config in asked} == {"local"}
    assert {config.model for config in asked} == {"tinymoe"}
    assert {config.budget for config in asked} == {"0.5"}
    assert "failed replaced routing: the disk is full" in text
    entries = {entry["rung"]: entry for entry in document["ladder"]}
    assert [entry["error"] is None for entry in entries.values()] == [True, True, False, True, True]
    assert entries["adapters"]["step"]["points"] is None
    assert entries["adapters"]["total"]["points"] is not None
    assert entries["adapters"]["paid_back"]["mean"]["reason"]
    assert [row["id"] for row in document["rows"]] == [entry["id"] for entry in document["ladder"]]


def test_markdown_and_csv_are_the_whole_output(home, capsys, monkeypatch):
    monkeypatch.setattr(command, "run_cell", lambda config, strict: [answered(config=config.resolved())])
    assert main(["ladder", "system=lru", "format=csv"]) == 0
    assert capsys.readouterr().out.startswith("rung,after,dataset,score")
    assert main(["ladder", "system=lru", "format=markdown"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("all items")


def test_an_exact_system_in_16_bits_loses_nothing(home, capsys, tmp_path):
    (tmp_path / "text.jsonl").write_text(json.dumps({"prompt": "chain: 1 + 1", "completion": " = 2\n# 2"}) + "\n")
    words = ["system=slru", "quant=none", "quality=quick", "quality.limit=1", f"quality.text={tmp_path}/text.jsonl"]
    short = ["workload.requests=1", "workload.new_tokens=24", "warmup_tokens=4"]
    code, text, document = run([*words, *short], capsys)
    assert code == 0
    (entry,) = document["ladder"]
    assert entry["rung"] == "streamed"
    assert entry["step"]["points"] == entry["total"]["points"] == 0
    assert entry["step"]["p"] == 1
    (row,) = document["rows"]
    assert row["metrics"]["token_agreement"]["value"] == 1
    assert row["metrics"]["kl_median_nats"]["value"] < 1e-6
    assert "streamed" in text
