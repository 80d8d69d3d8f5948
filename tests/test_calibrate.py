"""A calibration writes down every value with method, spread and day, says what it could not measure, keeps to its time,
and measures what it says: planted costs show, damage is seen.

Short measurements of small sizes; nothing here depends on how fast they are.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
import time

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from moebench import hardware
from moebench.cli import main
from moebench.curves import CURVES
from moebench.geometry import EMBEDDED, embedded_folder
from moebench.hardware import LOOP_NUMBERS, HardwareError
from moebench.hookspecs import hookimpl
from moebench.machine import detect
from moebench.plugins import load_plugins
from moebench.probes import beside, drift, drive, file, host, kernels, loop, memory, passes, processor
from moebench.probes.file import ProbeFile
from moebench.probes.reads import Reader
from moebench.probes.record import Record
from moebench.probes.samples import Samples
from moebench.store.engines import StoreError
from moebench.store.pages import page_cache_bytes
from moebench.units import KIB, MIB

SMALL = {
    drive: {
        "SIZES": (16 * KIB, 64 * KIB), "DEPTHS": (1, 2), "FEW_SIZES": (16 * KIB, 64 * KIB), "FEW_DEPTHS": (1, 2),
        "STRETCHES": (4 * KIB, 64 * KIB), "THREADS": (1, 2),
    },
    processor: {
        "COPIES": (16 * KIB, 64 * KIB), "WIDTHS": (64, 128), "DENSE_ROWS": (1, 4), "EXPERT_ROWS": (1, 4),
        "SHAPES": ((128, 64), (256, 128)),
    },
    host: {"SYSTEM_TURNS": 0},
    passes: {"CONTEXTS": (1, 4), "ROWS": (1, 4), "FIRST_ROWS": (1, 4)},
    kernels: {"AREA": MIB, "MOST": 8}, memory: {"AREA": 4 * MIB}, file: {"MOST_EXPERTS": 512}, beside: {"PAIRS": 1},
    drift: {"INTERVALS": 4, "ENDS": 1},
}  # fmt: skip


def patched(monkeypatch, home) -> None:
    monkeypatch.setenv("MOEBENCH_HOME", str(home))
    monkeypatch.setenv("MOEBENCH_PLUGINS", "")
    for module, values in SMALL.items():
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


SHARES: list[float] = []  # of the time, that the parts of the calibration below were given


@pytest.fixture(scope="module")
def written(home, tmp_path_factory):
    """The profile of one calibration, as its file holds it."""
    from moebench.harness.assets import load_live

    folder = tmp_path_factory.mktemp("drive")
    with pytest.MonkeyPatch.context() as patch:
        patched(patch, home)
        record = Record("2026-01-01", 0.5, lambda share, what: SHARES.append(share))
        where = host.Where(folder, 64 * MIB, lambda: load_live(embedded_folder(), EMBEDDED, "int4", "packed"))
        data = host.measure(where, record)
    assert not list(folder.iterdir())
    return yaml.safe_load(yaml.safe_dump(data, sort_keys=False))


@pytest.fixture
def small(monkeypatch, home):
    patched(monkeypatch, home)


@pytest.fixture
def probe(tmp_path, small):
    found = ProbeFile(tmp_path, 2 * MIB)
    found.write()
    return found


def entries(data):
    """Every number and curve of a profile, by where it stands."""
    for section in hardware.SECTIONS:
        yield from ((f"{section}.{name}", entry) for name, entry in data[section].items())
    yield from ((f"stack.{name}", entry) for name, entry in data["stacks"]["moebench"].items())
    yield "read_curve", data["read_curve"]
    yield from data["curves"].items()


def test_every_value_has_method_spread_and_day(written):
    count = 0
    for name, entry in entries(written):
        kind, _, method = entry["source"].partition(": ")
        assert kind == "measured", name
        assert len(method) > 5, name
        assert entry["date"].startswith("20"), name
        spread = entry.get("spread", entry)
        assert {"low", "high", "n"} <= set(spread), name
        assert spread["n"] >= 1
        count += 1
    assert count > 40


def test_all_curves_and_loop_numbers_are_measured_here_or_said_not_to_be(written):
    missing = (set(CURVES) | set(LOOP_NUMBERS)) - set(written["curves"]) - set(written["stacks"]["moebench"])
    assert missing <= set(written["unmeasured"])
    assert missing <= {"reads.uring", "live_layer_us", "live_load_us"}  # no system is run in this calibration
    assert len(written["unmeasured"]["caches beyond the page cache"]) > 20
    assert all(written["unmeasured"].values())


def test_the_profile_is_that_of_this_machine_and_survives_a_round_trip(written):
    profile = hardware.from_dict(written, "host.yaml")
    assert pickle.loads(pickle.dumps(profile)) == profile
    assert profile.matches(detect())
    assert profile.unmeasured == written["unmeasured"]
    given = written["bandwidth"]["dram_gb_s"]
    kept = profile.quantities["bandwidth.dram_gb_s"]
    assert (kept.value, kept.spread.low, kept.spread.n) == (
        given["value"],
        given["spread"]["low"],
        given["spread"]["n"],
    )
    assert kept.date == given["date"]
    assert profile.curves["copy"].spread.high[0][0] == written["curves"]["copy"]["high"][0][0]


def test_a_calibration_is_written_shown_and_listed(written, small, home, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(host, "measure", lambda where, record: copy.deepcopy(written))
    assert main(["calibrate", f"dir={tmp_path}"]) == 0
    text = capsys.readouterr().out
    document = json.loads(text.splitlines()[-1])
    assert document["unmeasured"] == list(written["unmeasured"])
    assert "not measured: caches beyond the page cache: " in text
    assert document["profile"] == str(home / "hardware" / "host.yaml")
    assert hardware.load(load_plugins().hardware_path("host")) == hardware.from_dict(written, "host.yaml")
    assert main(["list", "host"]) == 0
    text = capsys.readouterr().out
    assert "not measured: caches beyond the page cache" in text
    given = written["bandwidth"]["dram_gb_s"]["spread"]
    assert f"{given['low']:g} to {given['high']:g}, n {given['n']}" in text
    assert "experts.int4  measured:" in text


def test_a_modeled_run_with_other_curves_is_another_machine(written):
    other = copy.deepcopy(written)
    other["curves"]["dense"]["rows"][0][0] *= 1.01
    assert hardware.from_dict(written, "x").digest != hardware.from_dict(other, "x").digest
    other = copy.deepcopy(written)
    other["curves"]["dense"]["high"][0][0] *= 2  # not what a run computes with
    assert hardware.from_dict(written, "x").digest == hardware.from_dict(other, "x").digest


@pytest.mark.parametrize(
    ("spoil", "hint"),
    [
        (lambda d: d["curves"].update(rumours={}), "unknown curve rumours"),
        (lambda d: d["curves"]["dense"].pop("low"), "belong together"),
        (lambda d: d["curves"]["dense"].update(unit="GB/s"), "in us"),
        (lambda d: d["curves"]["dense"]["low"].pop(), "rows of"),
        (lambda d: d["curves"]["copy"].update(n=0), "at least 1"),
        (lambda d: d["read_curve"].update(date="yesterday"), "YYYY-MM-DD"),
        (lambda d: d["compute"]["bf16_tflops"]["spread"].update(low=1e9), "outside its spread"),
        (lambda d: d["compute"]["bf16_tflops"].update(spread=[1, 2]), "low, high, n"),
        (lambda d: d["compute"]["beside_reads"].update(value=0), "larger than 0"),
        (lambda d: d["stacks"]["moebench"].update(magic_us={}), "step_us"),
        (lambda d: d.update(unmeasured=["gpu"]), "names to reasons"),
    ],
)
def test_what_does_not_hold_together_is_one_line(written, spoil, hint):
    data = copy.deepcopy(written)
    spoil(data)
    with pytest.raises(HardwareError, match=hint) as caught:
        hardware.from_dict(data, "x.yaml")
    assert "\n" not in str(caught.value)


def test_parts_share_the_time_that_there_is(written):
    assert 0.9 <= sum(SHARES) <= 1.0


def test_what_others_compute_meanwhile_is_seen():
    others = host.Others()
    worker = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.5)
        busy = others.share()
    finally:
        worker.kill()
        worker.wait()
    assert busy > 0.1 / (os.cpu_count() or 1)


def refuse(why):
    def refused(*_, **__):
        raise StoreError(why)

    return refused


def test_what_is_refused_is_said_and_the_rest_is_measured(small, tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "rans_decoding", refuse("no compiler"))
    monkeypatch.setattr(file, "drop_page_cache", lambda path: (False, "it stays"))
    record = Record("2026-01-01", 0.2, lambda share, what: None)
    data = host.measure(host.Where(tmp_path, 64 * MIB, refuse("no model")), record)
    profile = hardware.from_dict(data, "x.yaml")
    assert profile.unmeasured["compute.rans_gb_s"] == "no compiler"
    assert profile.unmeasured["reads.mmap"] == profile.unmeasured["faults"] == "it stays"
    assert profile.unmeasured["layers"] == "no model"
    assert not profile.declares("compute.rans_gb_s")
    assert profile.quantities["storage.page_fault_us"].kind == "estimate"
    assert profile.constants().quantities["layer_floor_us"].kind == "estimate"
    assert "cached.mmap" in profile.curves


def test_a_drive_that_refuses_direct_reads_is_one_line(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("moebench.store.engine_threads.open_direct", refuse("this file system refuses direct reads"))
    assert main(["calibrate", "seconds=1", "file_gib=0.05", f"dir={tmp_path}", f"out={tmp_path / 'x.yaml'}"]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("moebench: error")]
    assert "read_curve cannot be measured" in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [["model=/nope"], ["seconds=0"], ["file_gib=0.01"]])
def test_wrong_use_is_found_before_anything_is_measured(words, small, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["calibrate", *words]) == 2
    assert not list(tmp_path.iterdir())


# --- the probes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["cold", "warm", "sequential", "ahead"])
@pytest.mark.parametrize("engine", ["direct", "pread", "mmap"])
def test_reads_are_hashed_as_in_a_run(probe, engine, state):
    assert getattr(Reader(probe, engine), state)(16 * KIB, 2, 0.01) > 0
    with probe.path.open("r+b") as opened:
        opened.write(bytes(2 * MIB))
    with pytest.raises(StoreError, match="wrong bytes"):
        getattr(Reader(probe, engine), state)(16 * KIB, 2, 0.01)


def test_cold_means_that_nothing_is_cached(probe, monkeypatch):
    seen = []
    demand = Reader._demand

    def watched(self, *arguments):
        seen.append(page_cache_bytes(probe.path)[0])
        return demand(self, *arguments)

    monkeypatch.setattr(Reader, "_demand", watched)
    probe.path.read_bytes()
    for _ in range(3):
        Reader(probe, "mmap").cold(16 * KIB, 2, 0)
    assert seen == [0, 0, 0]
    Reader(probe, "mmap").warm(16 * KIB, 2, 0)
    assert seen[-1] > 0


def test_a_cost_planted_in_the_loop_shows_where_it_was_planted(probe, monkeypatch):
    class Slow(loop.Plain):
        @hookimpl
        def acquired(self, keys, ready):
            time.sleep(0.001)

    plain = loop.overheads(probe)
    monkeypatch.setattr(loop, "Plain", Slow)
    slow = loop.overheads(probe)
    assert slow.layer > plain.layer + 900
    assert slow.request < 900  # and not there


def test_a_share_is_what_is_left_beside_the_other_work():
    going = []

    def background(wanted):
        going.append(True)
        while wanted():
            time.sleep(0.001)
        going.pop()
        return 2.0

    found = beside.shares(lambda seconds: 0.25 if going else 1.0, beside.Background(background), 0.1)
    assert set(found.first.values) == {0.25}
    assert set(found.second.values) == {1.0}


def test_work_that_fails_in_the_background_is_raised():
    def background(wanted):
        raise StoreError("the disk is gone")

    with pytest.raises(StoreError, match="gone"), beside.Background(background).running():
        time.sleep(0.05)


@given(st.lists(st.floats(0.01, 1e6), min_size=1, max_size=60))
def test_the_median_lies_within_the_spread(values):
    samples = Samples(tuple(values))
    entry = Record("2026-01-01", 1, lambda share, what: None).number(samples, "us", "made up")
    assert hardware.quantity(entry, "us", "x").value == entry["value"]
    assert min(values) <= samples.spread.low <= samples.median <= samples.spread.high <= max(values)
    assert samples.spread.n == len(values)


def test_an_expert_is_computed_as_stored_in_every_quantisation(small):
    nbytes = {kind: kernels.Expert(kind, 128, 64).nbytes for kind in processor.QUANTS}
    assert nbytes == {"none": 49152, "int8": 24576 + 512, "int4": 13824}
    for kind in processor.QUANTS:
        assert kernels.Expert(kind, 128, 64).times(2, 0).median > 0
