"""Whatever goes wrong below an engine, an expert arrives with the right bytes or as a ``StoreError``; nothing hangs."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from read_fixtures import ALL, NO_URING, READERS, make_packs, run_of

from moebench.store.engines import StoreError, open_engine
from moebench.store.pages import aligned_buffer
from moebench.units import PAGE

INNER = ALL[:-1]


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    return make_packs(tmp_path_factory)


def read_all(pack, runs=0, **options):
    """Outcome per key: None for right bytes, else the error's text; and the engine, closed. ``runs``: read in runs of
    so many experts."""
    buffers, outcomes = [aligned_buffer(pack.slot_bytes) for _ in range(pack.keys)], []
    with open_engine("faulty", pack, **options) as engine:
        futures = {}
        for key in () if runs else range(pack.keys):
            futures[key] = engine.submit(key, buffers[key], key % 2)
        order = run_of(pack, range(pack.keys))[0]
        for at in range(0, pack.keys, runs) if runs else ():
            keys = order[at : at + runs]
            futures |= zip(keys, engine.submit_run(keys, [buffers[k] for k in keys], at % 2), strict=True)
        for key, future in sorted(futures.items()):
            try:
                future.result(timeout=20)
                pack.check(key, buffers[key])
                outcomes.append(None)
            except StoreError as error:
                outcomes.append(str(error))
        engine.check_integrity()
    return outcomes, engine


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize(("fault", "words"), [("eio", "EIO"), ("bit_flip", "wrong bytes")])
def test_certain_faults_are_named_for_every_expert(packs, inner, fault, words):
    outcomes, engine = read_all(packs["packed"], inner=inner, **{fault: 1.0})
    if inner in ("direct", "uring") and fault == "bit_flip":  # a flip in the padding harms nobody
        outcomes = [text for text in outcomes if text is not None]
    assert outcomes
    assert engine.injected[fault] >= 12
    for text in outcomes:
        assert words in text
        assert "experts.bin: layer " in text
        assert "offset " in text


@pytest.mark.parametrize("layout", ["packed", "checkpoint", "rans"])
@pytest.mark.parametrize("inner", INNER)
def test_short_reads_now_and_then_are_made_good(packs, inner, layout):
    outcomes, engine = read_all(packs[layout], inner=inner, short_read=0.4, seed=5)
    assert engine.injected["short_read"] > 0
    assert outcomes.count(None) >= 6
    assert all("short read" in text for text in outcomes if text)


@given(
    layout=st.sampled_from(["packed", "ordered", "checkpoint", "scattered", "rans"]),
    runs=st.sampled_from([0, 0, 2, 5]),
    pool=st.integers(1, 4),
    options=st.fixed_dictionaries(
        {
            "seed": st.integers(0, 2**32),
            "inner": st.sampled_from([*READERS, *(["uring"] if NO_URING is None else [])]),
            "reorder": st.integers(0, 15),
            "block_bytes": st.sampled_from([0, PAGE, 1 << 20]),
            **dict.fromkeys(("eio", "short_read", "bit_flip"), st.sampled_from([0.0, 0.1, 0.5])),
        }
    ),
)
@settings(max_examples=100, deadline=None)
def test_every_mixture_of_faults_ends_in_right_bytes_or_an_error(packs, layout, runs, pool, options):
    if options["inner"] == "uring":
        del options["block_bytes"]
    lands = layout == "rans" or (layout in ("checkpoint", "scattered") and options["inner"] in ("direct", "uring"))
    runs = runs if packs[layout].manifest.extents.whole else 0
    outcomes, engine = read_all(packs[layout], runs, threads=3, **({"pool": pool} if lands else {}), **options)
    assert len(outcomes) == 12
    if not any(engine.injected[fault] for fault in ("eio", "short_read", "bit_flip")):
        assert outcomes == [None] * 12


def test_the_plan_follows_the_seed_and_not_the_threads(packs):
    options = {"eio": 0.3, "inner": "pread"}
    plans = [read_all(packs["packed"], seed=4, threads=threads, **options)[0] for threads in (1, 4, 4)]
    assert plans[0] == plans[1] == plans[2]
    assert plans[0] != read_all(packs["packed"], seed=5, **options)[0]


def test_faults_can_be_aimed_at_experts(packs):
    for layout, inner in (("packed", "direct"), ("checkpoint", "pread"), ("rans", "mmap")):
        outcomes, _ = read_all(packs[layout], inner=inner, eio=1.0, keys=[2, 7])
        assert [key for key, text in enumerate(outcomes) if text] == [2, 7]


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("layout", ["packed", "rans"])
def test_a_fault_of_a_run_fails_every_expert_of_it_by_name_and_no_other(packs, inner, layout):
    pack = packs[layout]
    keys = run_of(pack, range(pack.keys))[0]
    outcomes, engine = read_all(pack, runs=4, inner=inner, eio=1.0, keys=[keys[5]])
    assert engine.injected["eio"] == 1
    assert [key for key, text in enumerate(outcomes) if text] == sorted(keys[4:8])
    for key in keys[4:8]:
        assert f"layer {key // 4}, expert {key % 4}, offset {pack.segments(key)[0].offset}: read at " in outcomes[key]


@pytest.mark.parametrize("inner", INNER)
def test_delayed_experts_arrive_late_and_right(packs, inner):
    start = time.monotonic()
    outcomes, _ = read_all(packs["packed"], inner=inner, delay_s=0.05, keys=[3])
    assert outcomes == [None] * 12
    assert time.monotonic() - start >= 0.05


def test_shuffled_completions_come_in_another_order_with_the_right_bytes(packs):
    pack, done = packs["packed"], []
    buffers = [aligned_buffer(pack.slot_bytes) for _ in range(pack.keys)]
    with open_engine("faulty", pack, reorder=12, threads=1, delay_s=0.002) as engine:
        futures = []
        for key in range(pack.keys):
            futures.append(engine.submit(key, buffers[key], 0))
            futures[-1].add_done_callback(lambda _, key=key: done.append(key))
        for key, future in enumerate(futures):
            future.result(timeout=20)
            pack.check(key, buffers[key])
    assert sorted(done) == list(range(12))
    assert done != list(range(12))
    assert engine.injected["reorder"] > 0


def test_a_single_held_expert_is_handed_out_when_nothing_else_can_come(packs):
    buffer = aligned_buffer(packs["packed"].slot_bytes)
    with open_engine("faulty", packs["packed"], reorder=8) as engine:
        assert engine.submit(0, buffer, 0).result(timeout=20) > 0
        with pytest.raises(StoreError, match="no expert 99"):
            engine.submit(99, buffer, 0)
        assert engine.submit(1, buffer, 0).result(timeout=20) > 0


def test_closing_resolves_everything_that_was_handed_out(packs):
    pack = packs["packed"]
    engine = open_engine("faulty", pack, reorder=12, threads=1, delay_s=0.01)
    futures = [engine.submit(key, aligned_buffer(pack.slot_bytes), 1) for key in range(pack.keys)]
    engine.promote(11)
    engine.close()
    engine.close()
    assert all(future.done() for future in futures)
    assert any(isinstance(future.exception(), StoreError) for future in futures)


def test_impossible_plans_are_refused(packs):
    for options, word in (
        ({"eio": 1.5}, "rates"),
        ({"delay_s": -1}, "delay_s"),
        ({"inner": "faulty"}, "mmap, pread, direct, uring"),
    ):
        with pytest.raises(StoreError, match=word):
            open_engine("faulty", packs["packed"], **options)
