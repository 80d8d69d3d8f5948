"""A comparison reads from the floor to the ceiling, fits a terminal, and says below the table what is not in it."""

from __future__ import annotations

import dataclasses
import io
import random

import pytest
from test_result_files import make_row

from moebench.plugins import load_plugins
from moebench.report.comparison import COLUMNS, print_comparison
from moebench.report.table import HEADINGS, number
from moebench.result import METRICS, metric

ROLES = {
    "ondemand": "floor",
    "decayed_lfu": "baseline",
    "moe_infinity": "system",
    "edge0": "system",
    "belady": "oracle",
    "resident": "ceiling",
}
CONFIG = {"budget": "0.25", "quant": "int4"}


def row_of(system: str, model: str = "tinymoe", **changes):
    found = {name: metric(name, 0.0123, "modeled") for name in METRICS}
    seen = {"decode_tok_s": 456.7, "peak_active_gib": 0.00326, "hit_rate": 0.735, "ssd_mib_per_token": 0.175}
    seen |= {"reads_per_token": 11.2, "stall_ms_per_token": 0.00958}
    found |= {name: metric(name, value, "modeled") for name, value in seen.items()}
    found["token_agreement"] = metric("token_agreement", 0.9876, "measured")
    found["quality_delta"] = metric("quality_delta", -12.5, "measured", ci=(-25.0, -2.5))
    found |= changes.pop("metrics", {})
    return make_row(system=system, model=model, metrics=found, config=CONFIG, fidelity="advisory", **changes)


def published(system: str, model: str):
    found = {name: metric(name, None, None, reason="the publication does not report it") for name in METRICS}
    found["decode_tok_s"] = metric("decode_tok_s", 20.4, "published", source="arXiv 1")
    found["allocator_peak_gib"] = metric("allocator_peak_gib", 2.9, "published", source="arXiv 1")
    return make_row(
        system=system, model=model, metrics=found, config={}, assumptions=(),
        workload={"kind": "published", "seed": 0, "hash": ""}, protocol={"setting": "K=4"},
    )  # fmt: skip


def shown(rows, width: int) -> str:
    stream = io.StringIO()
    print_comparison(rows, ROLES, stream, width)
    return stream.getvalue()


def lines_of(text: str, system: str) -> list[str]:
    return [line for line in text.splitlines() if line.split()[:1] == [system]]


@pytest.mark.parametrize("seed", range(4))
def test_whatever_order_rows_come_in_the_table_goes_from_the_floor_to_the_ceiling(seed):
    rows = [row_of(system) for system in ROLES]
    random.Random(seed).shuffle(rows)
    first = [line.split()[0] for line in shown(rows, 120).splitlines() if line.strip()]
    order = [word for word in first if word in {*ROLES, "floor", "baselines", "systems", "oracle", "ceiling"}]
    systems = [row.system for row in rows if ROLES[row.system] == "system"]
    want = ["floor", "ondemand", "baselines", "decayed_lfu", "systems", *systems, "oracle", "belady", "ceiling"]
    assert order == [*want, "resident"]


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_it_fits_and_nothing_is_cut(width):
    text = shown([row_of(system, assumptions=("assumed: recall 0.86 " * 9,)) for system in ROLES], width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for system in ROLES:
        assert lines_of(text, system)
    assert text.count("457~") + text.count("457 ~") == len(ROLES)
    assert text.count("-12.5") == len(ROLES)


@pytest.mark.parametrize("width", [80, 120])
def test_at_the_width_of_a_terminal_there_is_one_line_for_each_system(width):
    text = shown([row_of(system) for system in ROLES], width)
    assert all(len(lines_of(text, system)) == 1 for system in ROLES)
    assert ("[-25.0, -2.50]" in text) is (width == 120)


def test_one_table_for_each_model_and_columns_that_mean_something_in_it():
    none = {name: metric(name, None, None, 0, "nobody answers") for name in ("token_agreement", "quality_delta")}
    rows = [row for system in ROLES for row in (row_of(system), row_of(system, "giant", metrics=none))]
    small, giant = shown(rows, 120).split("giant on ")
    assert "agree\n" in small.replace(" ", "\n")
    assert "agree\n" not in giant.replace(" ", "\n")
    told = f"- no {HEADINGS['token_agreement']}, {HEADINGS['quality_delta']}: nobody answers"
    assert told in giant
    assert told not in small


def test_what_some_systems_lack_names_them():
    gone = {"hit_rate": metric("hit_rate", None, None, 0, "it has no cache")}
    rows = [row_of(system, metrics=gone if system == "ondemand" else {}) for system in ROLES]
    assert "- no hit rate: ondemand: it has no cache" in shown(rows, 120).splitlines()


def test_a_failed_system_stays_with_its_reason_and_names_no_column():
    gone = {name: metric(name, None, None, 0, "the run failed") for name in METRICS}
    rows = [row_of(system) for system in ROLES if system != "resident"]
    text = shown([*rows, row_of("resident", metrics=gone, status="failed", error="holds 16 GiB, has 11")], 80)
    (line,) = lines_of(text, "resident")
    assert "failed" in line
    assert text.count("holds 16 GiB, has 11") == 1
    assert "the run failed" not in text


def test_published_figures_stand_below_their_system_marked_and_with_their_source():
    text = shown([row_of("edge0", "giant"), published("edge0", "giant"), row_of("resident", "giant")], 80)
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(" edge0"))
    assert lines[at + 1].split()[0] == "published"
    assert "20.4†" in lines[at + 1].replace(" †", "†")
    flat = " ".join(text.split())
    assert "† edge0: 20.4 decode tok/s, 2.90 allocator peak GiB (arXiv 1); setting: K=4" in flat


def test_notes_are_said_once_and_name_whom_they_are_about():
    common = "assumed: a synthetic trace"
    rows = [
        row_of(system, assumptions=(common, "assumed: heads", "altered: 2 of 4") if system == "edge0" else (common,))
        for system in ROLES
    ]
    lines = shown(rows, 200).splitlines()
    assert common in lines
    assert "edge0: assumed: heads; altered: 2 of 4" in lines
    assert sum("synthetic trace" in line for line in lines) == 1


def test_bounds_are_explained_where_they_stand():
    assert "oracle: knows the future" in shown([row_of("edge0"), row_of("belady")], 120)
    assert "knows the future" not in shown([row_of("edge0"), row_of("resident")], 120)


def test_what_hooks_took_is_one_line():
    rows = [dataclasses.replace(row_of(s), volatile={"hook_us_per_token": 41.0}) for s in ("edge0", "belady")]
    assert "hooks and policy, us/token on this machine: edge0 41.0, belady 41.0" in shown(rows, 120).splitlines()


def test_markup_in_a_name_or_a_note_is_text():
    text = shown([row_of("edge0", "a [bold]b[/bold]", assumptions=("[red]x[/red]",))], 80)
    assert "[bold]b[/bold]" in text
    assert "[red]x[/red]" in text


def test_columns_are_metrics_of_the_table():
    assert set(COLUMNS) <= set(METRICS)


@pytest.mark.parametrize(
    ("value", "text"), [(0.00326, "0.0033"), (0.203, "0.203"), (0.00005, "0.00005"), (12.34, "12.3")]
)
def test_fewer_decimals_never_make_a_value_zero(value, text):
    assert number(value, 4) == text


def test_the_roles_of_what_ships():
    registry = load_plugins()
    roles = {name: registry.role(name) for name in registry.systems}
    assert {name for name, role in roles.items() if role == "system"} == {
        "edge0", "flashmoe", "moe_infinity", "specprefetch", "ssd_llama", "bigmomo",
    }  # fmt: skip
    assert [name for name, role in roles.items() if role == "floor"] == ["ondemand"]
    assert [name for name, role in roles.items() if role == "ceiling"] == ["resident"]
    assert [name for name, role in roles.items() if role == "oracle"] == ["belady"]
