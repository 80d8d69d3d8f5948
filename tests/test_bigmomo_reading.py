"""A window's reads: order, runs, gaps, the bound on a request, and the gap that the read curve favours."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moebench.systems.bigmomo.reading import NEVER, Reader, request_ends, spans

placed = st.sets(st.integers(0, 200), min_size=1, max_size=30)
gaps = st.integers(NEVER, 12)
bounds = st.integers(1, 20)


@given(placed, gaps, bounds, st.integers(0, 2**32 - 1))
def test_every_key_is_read_once_in_order_of_place_by_requests_within_gap_and_bound(places, gap, most, seed):
    places = np.random.default_rng(seed).permutation(sorted(places))
    keys = 1000 - places  # any other numbering
    runs, between = Reader(gap, most).plan(keys, places)
    read = [key for run in runs for key in run]
    assert read == sorted(keys.tolist(), reverse=True)
    for run in runs:
        at = 1000 - np.array(run)
        assert at[-1] - at[0] < most
        assert (np.diff(at) - 1 <= gap).all()
    assert between == sum(1000 - np.array(run[-1]) - (1000 - run[0]) + 1 - len(run) for run in runs)
    if gap == NEVER:
        assert len(runs) == len(keys)
        assert between == 0


@given(placed, bounds)
def test_a_wider_gap_means_no_more_requests_and_no_fewer_experts_read(places, most):
    places = np.sort(np.array(list(places)))
    ends = [request_ends(places, gap, most) for gap in range(NEVER, 12)]
    if most >= 201:  # pieces of a bound may split what a narrower gap split elsewhere
        assert (np.diff([e.sum() for e in ends]) <= 0).all()
    assert ends[1].sum() <= ends[0].sum()
    assert spans(places, ends[1]).sum() == len(places)
    assert spans(places, ends[0]).sum() == len(places)


def latency_bound(latency):
    """A drive of one expert a second and so many seconds of latency, which two requests at a time share."""
    return lambda count, depth: count + latency / min(depth, 2)


@given(placed, st.floats(0, 50))
def test_the_automatic_gap_is_over_no_later_than_any_other(places, latency):
    places, most = np.sort(np.array(list(places))), 16
    reader = Reader(None, most, latency_bound(latency))
    took = [reader.total_s(spans(places, request_ends(places, gap, most))) for gap in range(most)]
    best = reader.total_s(spans(places, request_ends(places, reader.best_gap(places), most)))
    assert best <= min(took) + 1e-9


def test_reading_along_pays_where_a_request_costs_more_than_what_lies_between():
    places = np.array([0, 3, 6, 9])
    assert Reader(None, 64, latency_bound(0.0)).best_gap(places) == 0
    assert Reader(None, 64, latency_bound(50.0)).best_gap(places) == 2
    keys = np.arange(4)
    apart, along = (Reader(None, 64, latency_bound(s)).plan(keys, places) for s in (0.0, 50.0))
    assert (len(apart[0]), apart[1]) == (4, 0)
    assert (len(along[0]), along[1]) == (1, 6)
