"""The arithmetic of forecasts against measurements: errors, noise, ranks, bars; and the record that tables print."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebench import forecast
from moebench.errors import MoebenchError
from moebench.forecast import Record
from moebench.machine import Machine
from moebench.validation import STALL_FLOOR, Compared, apart, bars, quantile, ranked

SPEEDS = st.floats(0.1, 1e4)


def compared(speed=(10.0,), modeled=10.0, system="lru", **more) -> Compared:
    """A cell whose traffic is forecast right."""
    traffic = {"hit_rate": 0.5, "ssd_mib_per_token": 2.0}
    return Compared(
        more.pop("workload", "replay"), system, more.pop("budget", "0.5"), more.pop("timing_dependent", False),
        measured={"decode_tok_s": tuple(speed), **{name: (value,) * len(speed) for name, value in traffic.items()}},
        modeled={"decode_tok_s": modeled, **traffic}, **more,
    )  # fmt: skip


def verdicts(*cells) -> dict[str, bool]:
    """What became of each bar."""
    return {bar.name: bar.met for bar in bars(cells)}


@given(st.lists(SPEEDS, min_size=1, max_size=9), st.floats(0.01, 100))
def test_a_forecast_k_times_the_measured_is_off_by_k_less_one(speeds, factor):
    cell = compared(speeds)
    cell = dataclasses.replace(cell, modeled={"decode_tok_s": factor * cell.value("decode_tok_s")})
    assert cell.ratio("decode_tok_s") == pytest.approx(factor)
    assert cell.deviation("decode_tok_s") == pytest.approx(factor - 1, abs=1e-9)
    assert cell.noise("decode_tok_s") is None if len(speeds) == 1 else cell.noise("decode_tok_s") >= 0


@given(st.floats(0, 1e3), st.floats(0, 1e3), SPEEDS)
def test_a_stall_is_judged_as_a_share_of_itself_or_of_the_tokens_time(measured, modeled, speed):
    cell = Compared(
        "live", "lru", "0.5", False, {"stall_ms_per_token": (measured,), "decode_tok_s": (speed,)},
        {"stall_ms_per_token": modeled},
    )  # fmt: skip
    scale = max(measured, STALL_FLOOR * 1e3 / speed)
    assert cell.deviation("stall_ms_per_token") == pytest.approx((modeled - measured) / scale)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=50), st.floats(0.01, 1))
def test_a_quantile_is_the_least_value_that_its_share_does_not_exceed(values, share):
    found = quantile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) - 1e-9
    assert sum(value < found for value in values) < share * len(values)


def test_only_differences_beyond_the_noise_are_ranked():
    fast, slow = compared((10.0, 11.0), 5.0, "lru"), compared((8.0, 9.0), 4.0, "lfu")
    assert ranked([fast, slow]) == [("replay 0.5: lru, lfu", True)]
    assert ranked([fast, dataclasses.replace(slow, modeled={"decode_tok_s": 6.0})]) == [("replay 0.5: lru, lfu", False)]
    assert ranked([fast, compared((9.0, 10.5), 1.0, "lfu")]) == []  # repeats overlap
    assert ranked([fast, dataclasses.replace(slow, budget="0.25")]) == []
    assert ranked([fast, compared((8.0,), 1.0, "lfu")]) == []  # of one repeat the noise is not known


@pytest.mark.parametrize(
    ("cell", "near"),
    [
        (compared(), True),
        (dataclasses.replace(compared(), modeled={"hit_rate": 0.5001}), False),
        (dataclasses.replace(compared(timing_dependent=True), modeled={"hit_rate": 0.515}), True),
        (dataclasses.replace(compared(timing_dependent=True), modeled={"hit_rate": 0.525}), False),
        (dataclasses.replace(compared(timing_dependent=True), modeled={"ssd_mib_per_token": 2.09}), True),
        (dataclasses.replace(compared(timing_dependent=True), modeled={"ssd_mib_per_token": 2.11}), False),
        (dataclasses.replace(compared((1.0, 1.0)), measured={"hit_rate": (0.5, 0.51)}), False),  # not even with itself
    ],
)
def test_traffic_is_exact_where_no_clock_decides_and_near_elsewhere(cell, near):
    assert (not apart(cell)) is near


def test_each_bar_can_be_missed():
    good = [compared((10.0, 10.1), 10.0, name) for name in ("lru", "lfu", "slru")]
    assert all(verdicts(*good).values())
    off = [compared((10.0, 10.1), 8.8, name) for name in ("lru", "lfu", "slru")]
    assert verdicts(*off)["decode_tok_s: median error"] is False
    assert verdicts(*off)["decode_tok_s: cells within 25%"] is True
    assert verdicts(*good, compared((10.0, 10.1), 14.0, "random"))["decode_tok_s: cells within 25%"] is False
    turned = [compared((10.0, 10.1), 10.0), compared((9.0, 9.1), 10.05, "lfu")]
    assert verdicts(*turned)["systems ranked right"] is False
    wrong = dataclasses.replace(good[0], modeled={**good[0].modeled, "hit_rate": 0.4})
    assert verdicts(wrong)["hits and bytes equal where no clock decides"] is False
    late = dataclasses.replace(wrong, timing_dependent=True)
    assert verdicts(late)["hits and bytes near where the clock decides"] is False
    failed = dataclasses.replace(good[0], error="measured: no")
    assert verdicts(*good, failed)["cells that failed on one side"] is False


# --- the record -------------------------------------------------------------------------------------------------------

HERE = Machine("A processor", "", 23.5)


class Row:
    """As much of a row as is asked."""

    def __init__(self, hw: str, clock: str = "virtual") -> None:
        self.hw, self.protocol = hw, {"clock": clock}


def record(**changes) -> Record:
    """What a validation found."""
    errors = {"decode_tok_s": {"live": [0.05, -0.1], "replay": [0.3]}, "stall_ms_per_token": {"live": [0.2]}}
    return dataclasses.replace(Record("host", HERE.cpu, HERE.ram_gib, "2026-11-30", "abc", errors), **changes)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Without what ships."""
    monkeypatch.setattr(forecast, "shipped", list)


def test_the_band_is_of_sizes_over_all_workloads():
    band = record().band
    assert "decode tok/s median 10.0%, 95 % 30.0%" in band
    assert "stall median 20.0%, 95 % 20.0%" in band
    assert "3 cells" in band
    assert "A processor" in band
    assert "2026-11-30" in band


def test_modeled_rows_get_their_machines_band_and_measured_ones_none(tmp_path):
    forecast.write(tmp_path / forecast.FILE, record())
    told = forecast.told([Row("host"), Row("m4pro"), Row("other", "wall")], tmp_path, HERE)
    assert set(told) == {"host", "m4pro"}
    assert told["host"].startswith("modeled on host: forecast error of decode tok/s median 10.0%")
    assert told["m4pro"].startswith("modeled on m4pro: not validated on this machine; this model of time elsewhere:")
    other = Machine("Another", "", 23.5)  # a host.yaml there says nothing of here
    assert "not validated" in forecast.told([Row("host")], tmp_path, other)["host"]


def test_nothing_is_known_where_nobody_validated(tmp_path):
    assert forecast.told([Row("host")], tmp_path, HERE) == {"host": "modeled on host: not validated on this machine"}


def test_a_later_validation_takes_the_place_of_its_own_workloads_only(tmp_path):
    path = tmp_path / forecast.FILE
    forecast.write(path, record())
    forecast.write(path, record(errors={"decode_tok_s": {"live": [0.01]}}, date="2026-12-01"))
    (found,) = forecast.read(tmp_path)
    assert found.errors["decode_tok_s"] == {"live": [0.01], "replay": [0.3]}
    assert found.date == "2026-12-01"
    forecast.write(path, record(profile="new", errors={"decode_tok_s": {"live": [0.02]}}))
    (found,) = forecast.read(tmp_path)  # another profile: what was found of the old one says nothing of it
    assert found.errors == {"decode_tok_s": {"live": [0.02]}}
    forecast.write(path, record(hw="m4pro"))
    assert {one.hw for one in forecast.read(tmp_path)} == {"host", "m4pro"}


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 1, "machines": [{}]}', '{"schema": 2, "machines": []}'])
def test_a_damaged_record_is_one_line(tmp_path, text):
    (tmp_path / forecast.FILE).write_text(text)
    with pytest.raises(MoebenchError, match=r"forecast\.json"):
        forecast.read(tmp_path)


def test_what_ships_can_be_read(monkeypatch):
    monkeypatch.undo()
    assert all(found.sizes("decode_tok_s") for found in forecast.shipped())
