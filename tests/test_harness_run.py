"""Whole runs: what repeats repeats to the byte, and every number says where it comes from."""

# ruff: noqa: F811 - fixtures are imported

from __future__ import annotations

import dataclasses
import sys

import pytest
from harness_fixtures import LIVE, MINI, REPLAY, live, make_host, mini, packs, plugin  # noqa: F401 - fixtures

import moebench
from moebench import machine
from moebench.config import RunConfig
from moebench.errors import UsageError
from moebench.geometry import Geometry
from moebench.harness.plan import WHOLE_PROMPT, plan
from moebench.plugins import load_plugins
from moebench.result import METRICS, to_json
from moebench.store.pack import Pack
from moebench.trace.synthetic import SyntheticSpec, synthesize
from moebench.units import MIB

GEOMETRY = Geometry(**MINI)


def fixed(row) -> str:
    """A result file's text without its volatile block."""
    return to_json(dataclasses.replace(row, volatile={}))


# --- what repeats --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", ["lru", "random", "belady", "mmap"])
@pytest.mark.parametrize("hw", ["m4pro", "rtx5090_32gb"])
def test_a_replay_gives_the_same_bytes_twice(mini, monkeypatch, system, hw):
    monkeypatch.setattr(machine, "_commit", lambda: "fixed")
    options = {**REPLAY, "hw": hw, "system": system, "budget": "0.7", "workload.batch": 2}
    (one,), (two,) = moebench.run(**options), moebench.run(**options)
    assert fixed(one) == fixed(two)
    (other,) = moebench.run(**{**options, "workload.seed": 1})
    assert fixed(other) != fixed(one)
    assert set(one.volatile) == {"finished", "seconds", "hook_us_per_token", "hook_calls_per_token"}


def test_a_modeled_live_run_gives_the_same_bytes_twice(live, monkeypatch):
    monkeypatch.setattr(machine, "_commit", lambda: "fixed")
    options = {**LIVE, "hw": "m4pro", "system": "lru"}
    (one,), (two,) = moebench.run(**options), moebench.run(**options)
    assert fixed(one) == fixed(two)
    assert one.metrics["decode_tok_s"].provenance == "modeled"
    assert one.workload["kind"] == "prompts"


def test_belady_live_makes_two_passes_and_misses_least(live):
    found = {s: moebench.run(**LIVE, hw="m4pro", system=s)[0].metrics["hit_rate"].value for s in ("lru", "belady")}
    assert found["lru"] <= found["belady"]


def test_a_prompt_is_one_pass_where_the_system_says_so_and_the_run_does_not():
    registry = load_plugins()

    def chunk(system, **options):
        spec = registry.system(system)
        (cell, *_) = plan(RunConfig(system, "m4pro", spec.config(), **options), registry)
        return cell.config.chunk

    assert [chunk("ssd_llama"), chunk("ssd_llama", chunk=8), chunk("lru"), chunk("lru", chunk=8)] == [
        WHOLE_PROMPT, 8, 32, 8
    ]  # fmt: skip


def test_a_measured_run_that_is_stopped_leaves_no_copy_of_its_pack(mini, monkeypatch, tmp_path):
    make_host(tmp_path / "home")
    left = tmp_path / "home" / "overlays" / "left"

    def stopped(*_):
        left.mkdir(parents=True)
        (left / "journal").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["moebench.harness.run"], "isolated", stopped)
    with pytest.raises(KeyboardInterrupt):
        moebench.run(system="lru", **{**REPLAY, "hw": "host"}, quality="none")
    assert not left.exists()


# --- what a row says -----------------------------------------------------------------------------------------------


def test_a_modeled_row_marks_every_number_and_explains_every_gap(mini):
    (row,) = moebench.run(system="lru", **REPLAY)
    assert set(row.metrics) == set(METRICS)
    for metric in row.metrics.values():
        assert metric.provenance == ("modeled" if metric.value is not None else None)
        assert metric.value is not None or metric.reason
    missing = {name for name, metric in row.metrics.items() if metric.value is None}
    undrafted = {"accepted_per_round", "verified_per_token", "host_rate"}  # and there is no host tier
    unasked = {"token_agreement", "kl_median_nats", "kl_p99_nats", "perplexity", "quality_delta"}
    assert missing == {"tpot_p99_ms", "process_peak_gib"} | unasked | undrafted
    assert row.protocol["clock"] == "virtual"
    assert "does not match m4pro" in row.protocol["why"]
    (said,) = [line for line in row.assumptions if line.startswith("assumed: routing from a synthetic trace")]
    assert said.endswith("none being fitted to mini") or "fitted to " in said
    assert any(line.startswith("transferred: ") for line in row.assumptions)
    assert row.workload["hash"]
    assert row.workload["kind"] == "synthetic"


@pytest.mark.parametrize("made_up", [True, False])
def test_a_made_up_trace_stays_an_assumption_and_a_recorded_one_is_none(mini, tmp_path, made_up):
    trace = synthesize(SyntheticSpec(layers=4, experts=16, top_k=2, sequences=2, prefill=4, decode=20))
    if not made_up:
        kept = {key: value for key, value in trace.metadata.items() if key != "generator"}
        trace = dataclasses.replace(trace, metadata=kept)
    path = tmp_path / "t.safetensors"
    trace.save(path)
    (row,) = moebench.run(system="lru", hw="m4pro", model="mini", workload="trace", **{"workload.path": str(path)})
    assert row.workload["kind"] == "trace"
    assert any(line.startswith("assumed") for line in row.assumptions) == made_up
    with pytest.raises(UsageError, match=r"has 4 layers of 16 experts, olmoe-1b-7b has 16 of 64"):
        moebench.run(system="lru", hw="m4pro", model="olmoe-1b-7b", workload="trace", **{"workload.path": str(path)})


def test_quality_is_measured_even_where_time_is_modeled(live, monkeypatch):
    from moebench.quality import local

    monkeypatch.setitem(local.ITEMS, "quick", 1)
    monkeypatch.setattr(local, "NEW_TOKENS", 12)
    (row,) = moebench.run(**{**LIVE, "quality": "quick"}, hw="m4pro", system="lru", quant="none")
    agreement, delta = row.metrics["token_agreement"], row.metrics["quality_delta"]
    assert agreement.provenance == delta.provenance == "measured"
    assert delta.n == 5
    assert 0.5 < agreement.value <= 1.0
    assert agreement.n > 50
    (low, high) = delta.ci
    assert low <= delta.value <= high


def test_auto_gives_the_embedded_model_and_the_reference_geometry(live):
    short = {key: value for key, value in LIVE.items() if key != "model"}
    live_row, replayed = moebench.run(**{**short, "workload.requests": 1, "workload.prompt_tokens": 4}, hw="m4pro")
    assert (live_row.model, replayed.model) == ("tinymoe", "qwen3.6-35b-a3b")
    assert (live_row.workload_name, replayed.workload_name) == ("prompts", "synthetic")
    assert live_row.config["budget"] == replayed.config["budget"]
    assert replayed.metrics["quality_delta"].value is None


def test_the_table_orders_floor_systems_and_bounds(mini):
    table = moebench.compare(["lfu", "random"], **REPLAY, budget="0.4").set_index("system")
    assert list(table["status"].unique()) == ["ok"]
    assert {"ondemand", "resident", "belady", "lru", "slru", "decayed_lfu", "lfu", "random"} == set(table.index)
    for name in ("hit_rate", "decode_tok_s"):
        column = table[name]
        for system in set(table.index) - {"ondemand", "resident", "belady"}:
            assert column["ondemand"] <= column[system] <= column["belady"] <= column["resident"]
    assert table["hit_rate"]["resident"] == 1.0
    assert table["reads_per_token"]["resident"] == table["stall_ms_per_token"]["resident"] == 0.0
    assert set(table["decode_tok_s.provenance"]) == {"modeled"}


def test_a_comparison_survives_a_machine_that_cannot_hold_everything(mini):
    short = {"hw": "m2_16gb", "model": "qwen3.6-35b-a3b", "workload.requests": 1, "workload.prompt_tokens": 2}
    small = {**short, "workload.new_tokens": 4, "warmup_tokens": 1, "quality": "none"}
    (row,) = moebench.run(system="resident", **small)
    assert row.status == "failed"
    assert "more than the 11.0 GiB" in row.error
    (row,) = moebench.run(system="lru", **small)
    assert row.status == "ok"


# --- measured ------------------------------------------------------------------------------------------------------


def test_a_live_run_on_this_machine_is_measured_in_a_process_of_its_own(live, tmp_path):
    make_host(tmp_path / "home")
    (row,) = moebench.run(**LIVE, hw="host", system="lru", engine="pread", repeats=3)
    assert row.status == "ok"
    assert row.protocol["clock"] == "wall"
    assert row.protocol["repeats"] == 3
    assert row.protocol["page_cache"].startswith("cold")
    for name in ("decode_tok_s", "ttft_s", "hit_rate", "peak_active_gib", "process_peak_gib"):
        assert row.metrics[name].provenance == "measured"
        assert row.metrics[name].value > 0
    speed = row.metrics["decode_tok_s"]
    assert speed.n == len(speed.samples) == 3
    assert speed.ci == (min(speed.samples), max(speed.samples))
    assert speed.value == sorted(speed.samples)[1]
    assert "page cache" in row.metrics["ssd_mib_per_token"].reason
    assert "no allocator statistics" in row.metrics["allocator_peak_gib"].reason.replace("keeps no", "no")


def test_replaying_random_bytes_reads_exactly_what_it_reports(mini, tmp_path):
    make_host(tmp_path / "home")
    options = {**REPLAY, "hw": "host", "system": "ondemand"}
    (row,) = moebench.run(**options)
    assert row.protocol["clock"] == "wall"
    pack = Pack.open(tmp_path / "home" / "packs" / "random-mini-4x16x128x64-int4-64-packed-none")
    pack.verify()
    assert (pack.layers, pack.experts, pack.expert_bytes) == (4, 16, GEOMETRY.expert_bytes)
    reads, mib = row.metrics["reads_per_token"].value, row.metrics["ssd_mib_per_token"].value
    assert reads == GEOMETRY.layers * GEOMETRY.top_k
    assert mib == pytest.approx(reads * pack.slot_bytes / MIB)
    assert row.metrics["process_peak_gib"].provenance == "measured"
    (modeled,) = moebench.run(**{**options, "mode": "model"})
    assert modeled.protocol["clock"] == "virtual"
    assert modeled.metrics["ssd_mib_per_token"].value == pytest.approx(mib)
    for system in ("lru", "belady"):
        wall, virtual = (moebench.run(**{**options, "system": system, "mode": m})[0] for m in ("measure", "model"))
        assert wall.metrics["hit_rate"].value == virtual.metrics["hit_rate"].value
