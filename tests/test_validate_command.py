"""``moebench validate``: cells run on both clocks, and what is printed, written and returned follows from them."""

# ruff: noqa: F811 - fixtures are imported

from __future__ import annotations

import json
import os
from importlib import resources
from pathlib import Path

import jsonschema
import pytest
from harness_fixtures import error_line, make_host, mini, plugin  # noqa: F401 - fixtures

from moebench import cli, forecast, hardware, results
from moebench.config import WorkloadConfig
from moebench.errors import MoebenchError
from moebench.harness import validate
from moebench.harness.isolate import Nursery
from moebench.plugins import load_plugins

SCHEMA = json.loads(resources.files("moebench").joinpath("validation.schema.json").read_text())
SMALL = ["cells=replay", "systems=lru,ondemand", "budgets=0.3", "repeats=2"]


KINDS = {"replay": validate.Kind("mini", WorkloadConfig(requests=2, prompt_tokens=8, new_tokens=24), 4, "model_io")}


@pytest.fixture
def host(mini, monkeypatch, tmp_path):
    """A profile of this machine that nobody measured, and cells of a small geometry."""
    monkeypatch.setattr(validate, "kinds", lambda trace="": KINDS)
    return make_host(tmp_path / "home")


def run(capsys, *words: str) -> tuple[int, str, dict]:
    """Exit code, what was printed, and the document that was written."""
    code = cli.main(["validate", "out=found", *words])
    out = capsys.readouterr().out
    last = json.loads(out.splitlines()[-1])
    return code, out, json.loads(Path(last["document"]).read_text())


def test_a_document_holds_every_cell_and_bar(host, capsys, tmp_path):
    code, out, document = run(capsys, *SMALL)
    jsonschema.Draft202012Validator(SCHEMA).validate(document)
    assert [(cell["system"], cell["budget"]) for cell in document["cells"]] == [("lru", "0.3"), ("ondemand", "any")]
    for cell in document["cells"]:
        assert len(cell["measured"]["stall_ms_per_token"]) == 2
        assert cell["modeled"]["hit_rate"] == cell["measured"]["hit_rate"][0]
        assert cell["page_cache"] == "bypassed by engine direct"
    assert code == int(not all(bar["met"] for bar in document["bars"]))
    assert code == 1  # an m4pro is another machine
    equal = [bar for bar in document["bars"] if "equal" in bar["name"]]
    assert [bar["met"] for bar in equal] == [True]
    assert "missed" in out
    assert len(results.read(["found"], strict=True)) == 6  # the document beside them is no row
    (record,) = forecast.read(tmp_path / "home")
    assert record.hw == "host"
    assert {len(values) for found in record.errors.values() for values in found.values()} == {2}
    assert cli.main(["run", "system=lru", "hw=host", "model=mini", "mode=model", "workload.new_tokens=20"]) == 0
    assert record.band in " ".join(capsys.readouterr().out.split())


def test_a_machine_held_to_less_is_the_same_file_with_these_numbers_changed(host, capsys, tmp_path):
    _, _, document = run(capsys, *SMALL[:2], "repeats=1", "read_mb_s=100", "ram_gib=3")
    assert document["hw"] == "host-100mb_s-3gib"
    registry = load_plugins()
    less, own = (hardware.load(registry.hardware_path(name)) for name in (document["hw"], "host"))
    assert less.limit_gb_s == 0.1
    assert less.ram_gib == 3
    assert not own.declares("storage.limit_gb_s")
    changed = {"storage.limit_gb_s", "memory.ram_gib", "memory.reserve_gib"}
    assert {name: q for name, q in less.quantities.items() if name not in changed} == {
        name: q for name, q in own.quantities.items() if name not in changed
    }
    assert (less.read_curve, less.stacks, less.curves) == (own.read_curve, own.stacks, own.curves)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["systems=lruu"], "unknown system 'lruu'"),
        (["repeats=0"], "repeats must be at least 1"),
        (["ram_gib=1000"], "is not less than what"),
        (["read_mb_s=-1"], "at least 0"),
        (["hw=m4pro"], "mode=measure needs the machine itself"),
    ],
)
def test_wrong_use_is_one_line(host, capsys, words, said):
    assert cli.main(["validate", "cells=replay", *words]) == 2
    assert said in error_line(capsys)


def test_an_unknown_kind_of_cells_lists_the_known_ones(host, capsys):
    assert cli.main(["validate", "cells=nothing"]) == 2
    assert "unknown kind of cells 'nothing'" in error_line(capsys)


def test_what_neither_clock_can_run_is_no_miss(host, capsys):
    _, out, document = run(capsys, "cells=replay", "systems=ondemand,lru", "budgets=0.001", "repeats=1")
    assert [cell["system"] for cell in document["cells"]] == ["ondemand"]
    assert "neither measured nor modeled: replay lru 0.001: budget 0.001 is" in out


def test_a_forecast_of_reads_alone_computes_nothing(host, tmp_path):
    registry = load_plugins()
    (pair,) = validate.pairs("host", KINDS, ["lru"], ["0.3"], registry, "out")
    assert (pair.measured.cell.clock, pair.modeled.cell.clock) == ("wall", "virtual")
    row = next(validate.Validation([pair], 1, registry).run())
    assert row.details["split_ms_per_token"]["compute"] == 0
    assert row.metrics["decode_tok_s"].value is None
    assert "computes nothing" in row.metrics["decode_tok_s"].reason


def test_the_cells_that_ship_are_those_of_the_page(plugin):
    found = validate.kinds()
    assert {name: (kind.model, kind.modeled) for name, kind in found.items()} == {
        "live": ("tinymoe", "model"),
        "replay": ("tinymoe", "model_io"),
        "large": ("olmoe-1b-7b", "model_io"),
    }
    assert Path(found["replay"].workload.path).is_file()


def test_reads_alone_are_no_forecast_of_a_model_that_computes(host, capsys):
    assert cli.main(["run", "system=lru", "hw=host", "model=tinymoe", "mode=model_io"]) == 2
    assert "mode=model_io models a measured replay" in error_line(capsys)


# --- processes of runs ------------------------------------------------------------------------------------------------


def nothing() -> None:
    """Prepare nothing."""


def process() -> tuple[int, int]:
    """This process and its parent."""
    return os.getpid(), os.getppid()


def wrong() -> None:
    """What a user can mend."""
    raise MoebenchError("mend this")


def die() -> None:
    """End without a word."""
    os._exit(3)


def test_every_run_has_a_process_of_its_own_under_one_that_has_loaded(tmp_path):
    with Nursery(nothing) as fresh:
        (one, parent), (two, other) = fresh(process), fresh(process)
        assert one != two
        assert parent == other != os.getpid()
        assert str(fresh(wrong)) == "mend this"
        assert "status 3" in str(fresh(die))
        assert fresh(process)[1] == parent  # and goes on
    with pytest.raises(MoebenchError, match="mend this"):
        Nursery(wrong)
