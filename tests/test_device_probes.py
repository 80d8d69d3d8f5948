"""A profile with a device in it, measured through the interface of devices; table and script that check a card."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest
import yaml
from harness_fixtures import make_host
from simulated_device import CARD, HOST, NOW, OnCard, SimDevice

from moebench import hardware
from moebench.backends import cuda_state
from moebench.commands.calibrate import CalibrateOptions
from moebench.commands.doctor import _cuda
from moebench.errors import UsageError
from moebench.probes import device as probes
from moebench.probes.record import Record

ROOT = Path(__file__).resolve().parent.parent


def simulated(at=HOST):
    return SimDevice(lambda stream, index: NOW, at=at)


@pytest.fixture
def small(monkeypatch):
    for name, value in (("COPY", 1 << 16), ("COPIES", 2), ("EXPERTS", 2), ("HIDDEN", 128), ("INTERMEDIATE", 64)):
        monkeypatch.setattr(probes, name, value)


def test_a_profile_with_a_device_says_what_is_the_devices(small, tmp_path):
    data = yaml.safe_load(make_host(tmp_path).read_text())
    data |= {"title": "a machine", "stack": "moebench", "stacks": {"moebench": data["stacks"][data["stack"]]}}
    data["compute"]["beside_reads"] = {"value": 0.9, "unit": "share", "source": "measured: something of the processor"}
    point = {"unit": "us", "source": "measured: x", "sizes_kib": [1], "row_counts": [1], "rows": [[1.0]]}
    data["curves"], data["unmeasured"] = {"experts.int4": point, "dense": point}, {}
    device, record = simulated(), Record("2026-01-01", 1.0, lambda share, what: None)
    try:
        found = probes.extend(data, device, "A Card", record)
        assert not device.pinned
    finally:
        device.close()
    profile = hardware.from_dict(found, "host.yaml")
    assert not profile.unified
    assert profile.match["gpu"] == "A Card"
    assert profile.device_gib == 1.0
    for name in ("bandwidth.h2d_gb_s", "bandwidth.d2h_gb_s", "bandwidth.device_gb_s", "compute.rans_gb_s"):
        assert profile.quantities[name].kind == "measured"
        assert profile.number(name) > 0
    assert not profile.curves  # the processor's are not the device's
    assert not profile.declares("compute.beside_reads")
    assert profile.dram_gb_s == data["bandwidth"]["dram_gb_s"]["value"]


def test_the_table_of_a_card_compares_arms(small, tmp_path, monkeypatch):
    spec = util.spec_from_file_location("cuda_table", ROOT / "benchmarks" / "cuda_table.py")
    table = util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "cuda_table", table)
    spec.loader.exec_module(table)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(table, "WARM", 1)
    shape = {"hidden_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 1, "num_experts": 24}
    device = simulated(CARD)
    try:
        with OnCard():
            found, speeds = table.table(device, 4, 0.05, **shape)
    finally:
        device.close()
    assert [row.identical for row in found] == [True] * len(table.ARMS)
    assert found[0].hit_rate == 1 > found[1].hit_rate
    assert found[0].booked_gib > found[1].booked_gib
    assert min(speeds.values()) > 0
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(cuda_state.refusal() is None, reason="there is a card here")
def test_without_a_card_everything_says_so():
    assert _cuda().found == cuda_state.refusal()
    assert not _cuda().ok
    with pytest.raises(UsageError, match="calibrate: device=cuda: torch"):
        CalibrateOptions(device="cuda")
    ran = subprocess.run(
        [ROOT / "scripts" / "gpu_check.sh"],
        check=False,
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 3
    assert ran.stdout.splitlines() == [f"gpu_check: nothing was checked: {cuda_state.refusal()}"]
