"""A time between and beyond the points of a curve: points are met, more rows never take less."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.curves import TimeCurve


@settings(deadline=None)
@given(
    st.lists(st.lists(st.floats(0.1, 1e5), min_size=3, max_size=3), min_size=3, max_size=3),
    st.floats(0.1, 1e3), st.tuples(st.floats(0.1, 1e3), st.floats(0.1, 1e3)),
)  # fmt: skip
def test_more_rows_take_no_less_time_and_points_are_met(rows, size, counts):
    curve = TimeCurve((1.0, 10.0, 1000.0), (1.0, 4.0, 32.0), tuple(map(tuple, rows)), "measured", "made up")
    few, many = sorted(counts)
    assert curve.seconds(size, few) <= curve.seconds(size, many) * (1 + 1e-9)
    assert curve.seconds(10, 1) == pytest.approx(rows[1][0] * 1e-6)
    assert curve.seconds(1000, 32) == pytest.approx(max(rows[2]) * 1e-6)


def test_beyond_its_points_a_time_goes_on_as_it_came():
    curve = TimeCurve((1.0, 10.0, 20.0), (1.0, 2.0), ((1.0, 2.0), (10.0, 20.0), (15.0, 25.0)), "measured", "made up")
    assert curve.seconds(40, 1) == pytest.approx(25e-6)
    assert curve.seconds(10, 4) == pytest.approx(40e-6)
    assert curve.seconds(0.1, 0.1) == pytest.approx(1e-6)
    assert curve.seconds(math.sqrt(10), 1) == pytest.approx(math.sqrt(10) * 1e-6)
