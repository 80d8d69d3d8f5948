"""Each number of a row follows its definition in ``docs/metrics.md``: records made by hand, sums done by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebench.engine.record import StepRecord
from moebench.metrics import NAMES, Metrics
from moebench.result import METRICS
from moebench.step import DECODE, PREFILL, Step
from moebench.units import GB, MIB


class Run:
    """Feeds hand-made steps to the observer and keeps the clock and the storage counter."""

    def __init__(self, warmup: int = 0, tiers=("device",)) -> None:
        self.now, self.delivered, self.view = 0.0, 0, SimpleNamespace(tiers=tiers)
        self.metrics = Metrics(warmup, lambda: (self.delivered, self.delivered // (MIB // 4)))

    def request(self) -> None:
        self.metrics.begin_request(np.arange(1), SimpleNamespace(now=self.now))

    def step(self, seconds, phase=DECODE, sequences=(0,), emits=None, delivered=0, **counts) -> None:
        """One pass; ``counts`` are fields of the record."""
        valid = np.array([s is not None for s in sequences])
        sequence = np.array([-1 if s is None else s for s in sequences], np.int32)
        emits = int(valid.sum()) if emits is None else emits
        step = Step(0, phase, sequence, np.zeros(len(sequence), np.int32), valid, emits)
        record = StepRecord(step, self.now, self.now + seconds, **counts)
        self.metrics.begin_step(step, None)
        self.now += seconds
        self.delivered += delivered
        self.metrics.end_step(step, record, self.view)

    def value(self, name: str):
        return self.metrics.numbers()[name][0]

    def reason(self, name: str):
        value, reason, _ = self.metrics.numbers()[name]
        assert value is None
        return reason


def test_every_name_is_a_metric_of_the_table():
    assert set(NAMES) < set(METRICS)
    run = Run()
    run.step(1.0)
    assert set(run.metrics.numbers()) == set(NAMES)


def test_rates_are_totals_over_the_timed_window():
    run = Run()
    run.step(0.5, requests=[4, 4], hits=[3, 1], late=[0, 2], demand_reads=2, prefetch_reads=5, delivered=3 * MIB,
             stall_s=0.125)  # fmt: skip
    run.step(0.25, requests=[4, 4], hits=[4, 4], late=[0, 0], prefetch_reads=1, delivered=MIB, stall_s=0.0)
    assert run.value("decode_tok_s") == 2 / 0.75
    assert run.value("hit_rate") == 12 / 16
    assert run.value("late_rate") == 2 / 16  # in the denominator, and no hit
    assert run.value("ssd_mib_per_token") == 2.0
    assert run.value("reads_per_token") == (2 + 5 + 1) / 2
    assert run.value("storage_requests_per_token") == 8  # four a MiB, in this test
    assert run.value("stall_ms_per_token") == 62.5
    assert run.value("effective_gb_s") == pytest.approx(4 * MIB / GB / 0.75)


def test_the_host_tier_has_a_rate_of_its_own():
    one, two = Run(), Run(tiers=("device", "host"))
    for run in (one, two):
        run.step(0.5, requests=[4, 4], hits=[3, 1], late=[0, 2], from_host=1)
    assert two.value("host_rate") == 1 / 8
    assert "one tier" in one.reason("host_rate")


def test_the_record_counts_what_is_neither_hit_nor_late_as_a_miss():
    record = StepRecord(None, 0.0, requests=[4, 5], hits=[2, 1], late=[1, 0])
    assert record.misses == 9 - 3 - 1


def test_prefill_ends_the_time_to_first_token_and_counts_nowhere_else():
    run = Run()
    run.now = 10.0
    run.request()
    run.step(2.0, PREFILL, emits=0, requests=[9], hits=[9], demand_reads=9, delivered=9 * MIB)
    run.step(1.0, PREFILL, emits=1, requests=[9], hits=[9], demand_reads=9, delivered=9 * MIB)
    run.step(0.5, requests=[2], hits=[1], demand_reads=1, delivered=MIB)
    run.request()
    run.step(1.0, PREFILL, emits=1)
    assert run.metrics.numbers()["ttft_s"] == (2.0, "", 2)  # of 3 s and 1 s
    assert run.value("decode_tok_s") == 2.0
    assert run.value("hit_rate") == 0.5
    assert run.value("ssd_mib_per_token") == 1.0
    assert run.value("reads_per_token") == 1.0


def test_warm_up_is_left_out_of_everything():
    run, cold = Run(warmup=3), {"requests": [4], "hits": [0], "demand_reads": 4, "delivered": 4 * MIB, "stall_s": 9.0}
    for _ in range(3):
        run.step(9.0, **cold)
    for _ in range(2):
        run.step(0.5, requests=[4], hits=[4])
    assert run.value("decode_tok_s") == 2.0
    assert run.value("hit_rate") == 1.0
    assert [run.value(n) for n in ("ssd_mib_per_token", "reads_per_token", "stall_ms_per_token")] == [0, 0, 0]
    assert run.value("tpot_p95_ms") == 500.0


def test_warm_up_counts_emitted_tokens_of_all_sequences():
    run = Run(warmup=4)
    for seconds in (8.0, 8.0, 0.5):
        run.step(seconds, sequences=(0, 1))
    assert run.value("decode_tok_s") == 4.0


@given(st.lists(st.floats(1e-3, 10.0), min_size=1, max_size=130))
def test_percentiles_are_the_nearest_rank(durations):
    run = Run()
    run.now = 0.0
    for seconds in durations:
        run.step(seconds)
        run.now = 0.0  # keeps each duration exact
    for name, share in (("tpot_p50_ms", 50), ("tpot_p95_ms", 95), ("tpot_p99_ms", 99)):
        value, reason, n = run.metrics.numbers()[name]
        assert n == len(durations)
        if name == "tpot_p99_ms" and n < 100:
            assert value is None
            assert reason == f"needs 100 samples, had {n}"
            continue
        # the smallest sample that at least this share (percent) of all samples do not exceed
        assert value in [1e3 * d for d in durations]
        below = sum(1e3 * d <= value for d in durations)
        strictly = sum(1e3 * d < value for d in durations)
        assert strictly < -(-share * n // 100) <= below


def test_time_per_token_is_what_one_sequence_of_a_batch_waits():
    run = Run()
    run.step(0.4, sequences=(0, 1, 2, 3))  # four sequences get a token each after 0.4 s
    assert run.value("tpot_p50_ms") == pytest.approx(400.0)
    assert run.value("decode_tok_s") == 10.0
    run = Run()
    run.step(0.4, sequences=(0, None, 2, None))  # two are done: their rows are padding
    assert run.value("tpot_p50_ms") == pytest.approx(400.0)
    assert run.value("decode_tok_s") == 5.0
    run = Run()
    run.step(0.4, sequences=(0, 0, 0, 0), emits=3)  # a window of four rows, of which three tokens were accepted
    assert run.value("tpot_p50_ms") == pytest.approx(400.0 / 3)


def test_what_was_not_seen_is_missing_with_its_reason():
    run = Run(warmup=2)
    run.request()
    run.step(1.0, PREFILL, emits=1)
    run.step(1.0)
    run.step(1.0)
    for name in set(NAMES) - {"ttft_s"}:
        assert "after warm-up" in run.reason(name)
    assert run.value("ttft_s") == 1.0


def test_no_prompt_tokens_no_requests_and_no_time_have_reasons():
    run = Run()
    run.request()
    run.step(0.0)
    assert "no prompt tokens" in run.reason("ttft_s")
    assert "no expert was requested" in run.reason("hit_rate")
    assert "no time passed" in run.reason("decode_tok_s")
    assert "no time passed" in run.reason("effective_gb_s")


def test_memory_grows_by_two_numbers_a_step():
    run = Run()
    for _ in range(50):
        run.step(0.1, requests=[2], hits=[1])
    held = [value for value in vars(run.metrics).values() if hasattr(value, "__len__")]
    assert sorted(map(len, held)) == [0, 2, 50, 50]  # times to first token, storage before, two arrays of doubles
