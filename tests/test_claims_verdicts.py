"""Verdicts follow from numbers: bands, ranges, independence, and gaps whose arithmetic closes."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebench.claims import Arm, Band, Claim, Input, Paper
from moebench.quantities import Found
from moebench.report.claims import document, page, tables
from moebench.report.judged import FAILED, NOT_TESTABLE, OUTSIDE, WITHIN, gaps, judge

SPLIT = {"split.stall": 60.0, "split.copy": 10.0, "split.decode": 0.0, "split.compute": 20.0, "split.overhead": 10.0}
SLOW = {"decode_tok_s": 10.0, "token_ms": 100.0, "hit_rate": 0.5, **SPLIT}
BAND = Band("a test", factor=1.25)
PLAIN = {"says": "it", "unit": "tok/s", "source": "a page", "metric": "decode_tok_s", "of": ("one",), "band": BAND}


def claim(published, **more):
    ends = published if isinstance(published, tuple) else (published, published)
    return Claim(**{"name": "x", "published": ends, **PLAIN, **more})


def paper(one, inputs=()):
    arms = {name: Arm(name, "run", {"system": "lru", "hw": "box"}) for name in one.arms}
    return Paper("p", "P", ("1",), tuple(inputs), arms, {one.name: one})


def verdict(one, found, inputs=()):
    return judge(paper(one, inputs), one, {name: Found(numbers) for name, numbers in found.items()})


@pytest.mark.parametrize(
    ("published", "said", "ratio"),
    [
        (10, WITHIN, 1),
        (12.5, WITHIN, 0.8),
        (12.6, OUTSIDE, 10 / 12.6),
        (7, OUTSIDE, 10 / 7),
        ((8, 12), WITHIN, 1),
        ((13, 20), OUTSIDE, 10 / 13),
    ],
)
def test_a_value_is_within_its_band_or_not(published, said, ratio):
    found = verdict(claim(published), {"one": SLOW})
    assert (found.verdict, found.ours) == (said, 10)
    assert found.ratio == pytest.approx(ratio)


def test_a_shared_result_is_said_beside_the_verdict():
    inputs = [Input("box", "a number", "result", ("time",))]
    for published, said in ((10, "not independent (within)"), (50, "not independent (outside)")):
        assert verdict(claim(published), {"one": SLOW}, inputs).told == said
    other = [Input("box", "a number", "result", ("memory",)), Input("box", "a size", "setting")]
    assert verdict(claim(10), {"one": SLOW}, other).told == WITHIN


def test_ratios_and_changes_need_both_arms():
    found = {"one": {**SLOW, "decode_tok_s": 30.0}, "two": SLOW}
    assert verdict(claim(3, form="ratio", over=("two",)), found).verdict == WITHIN
    assert verdict(claim(200, form="change", over=("two",)), found).ours == pytest.approx(200)
    for word in ({"of": ("one", "two"), "take": "max"}, {"of": ("one", "two"), "take": "mean"}):
        assert verdict(claim(20, **word), found).ours == {"max": 30, "mean": 20}[word["take"]]
    outside = verdict(claim(90, of=("one", "two"), take="max", form="ratio", over=("two", "one")), found)
    assert outside.reasons == ("one 30.0 over two 10.0: 3.00, two 10.0 over one 30.0: 0.333",)
    best = {"of": ("one", "two"), "take": "best_at", "at": (4.0, 8.0)}
    assert verdict(claim(8, **best), found).ours == 4


def test_what_failed_and_what_cannot_be_tested_is_no_verdict_on_a_number():
    one = claim(10)
    broken = judge(paper(one), one, {"one": Found({}, "out of memory")})
    assert (broken.verdict, broken.ours, broken.reasons) == (FAILED, None, ("one: out of memory",))
    assert judge(paper(one), one, {"one": Found({})}).verdict == FAILED
    idle = claim(10, of=(), metric="", band=None, not_testable="no weights")
    assert judge(Paper("p", "P", ("1",), (), {}, {"x": idle}), idle, {}).told == NOT_TESTABLE
    zero = verdict(claim(3, form="ratio", over=("two",)), {"one": SLOW, "two": {**SLOW, "decode_tok_s": 0.0}})
    assert zero.verdict == FAILED


def factors(line):
    return {part: float(times) for part, times in re.findall(r"(read|copy|compute|overhead) ([0-9.]+) times", line)}


@given(st.floats(2, 500))
def test_a_part_that_alone_closes_a_gap_does_close_it(wanted):
    (line,) = gaps(claim(1e3 / wanted), 10.0, SLOW, None)
    named = {"read": "split.stall", "copy": "split.copy", "compute": "split.compute", "overhead": "split.overhead"}
    for part, times in factors(line).items():
        ms = SLOW[named[part]]
        assert 100 - ms + ms * times == pytest.approx(wanted, rel=0.01, abs=0.6)
    possible = [key for key in named.values() if SLOW[key] + wanted - 100 >= 0]
    assert len(factors(line)) == len(possible)


def test_a_gap_in_a_ratio_names_both_arms():
    fast = {"decode_tok_s": 20.0, "token_ms": 50.0, "split.stall": 30.0, "split.compute": 20.0}
    lines = gaps(claim(4, form="ratio", over=("two",)), 2.0, fast, SLOW)
    assert lines[0].startswith(
        "one: 50.0 ms a token (read 30.0, compute 20.0), 25.0 wanted; alone that takes read 0.167"
    )
    assert lines[1].startswith("or two: 100 ms a token")
    assert "200 wanted" in lines[1]


def test_gaps_of_stall_bytes_and_memory_are_arithmetic():
    own = {"reads_per_token": 50.0, "hit_rate": 0.5, "stall_ms_per_token": 25.0, "expert_mib": 2.0}
    (line,) = gaps(claim(10, metric="stall_ms_per_token"), 25.0, own, None)
    assert "0.500 ms each; the published takes 0.200 ms each, or 20.0 reads" in line
    (line,) = gaps(claim(50, metric="ssd_mib_per_token"), 100.0, {**own, "ssd_mib_per_token": 100.0}, None)
    assert "takes 25.0, a hit rate of 0.750 for 0.500" in line
    (line,) = gaps(claim(3, metric="allocator_peak_gib"), 2.0, {"slots_gib": 1.5}, None)
    assert "1.50 GiB are expert slots, 0.500 all else; the published leaves 2.50 GiB" in line


def test_the_page_and_the_document_hold_every_claim():
    judged = [verdict(claim(published, name=f"x{n}"), {"one": SLOW}) for n, published in enumerate((10, 50))]
    text = page(judged)
    assert page(judged) == text
    assert "| x0 | it | 10.0 tok/s | 10.0 tok/s | 1.00 | within |" in text
    assert "| x1 | it | 50.0 tok/s | 10.0 tok/s | 0.200 | outside |" in text
    assert "**x1**: ours: 100 ms a token" in text
    assert "\n" not in document(judged)
    assert [row[0] for table in tables(judged) for row in table.rows] == ["x0", "x1"]
