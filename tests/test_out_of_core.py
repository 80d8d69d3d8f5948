"""The race's pure parts: the limit of a cache, busy time, ratios within a round, bars and table; its files' bytes; and
that a race which stopped goes on.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebench.errors import UsageError
from moebench.store.layout import QuantSpec
from moebench.store.pack import Pack
from moebench.store.quant import from_bf16, to_bf16
from moebench.store.writer import write_random_pack

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import out_of_core
from race import figures, machine, rounds
from race.files import rearrange
from race.gguf_file import gguf_name, q4_0

spans = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)).map(lambda s: (s[0], s[0] + s[1])), max_size=12)


@given(spans)
def test_busy_time_is_the_length_of_the_union(found):
    covered = {second for start, stop in found for second in range(start, stop)}
    assert figures.busy_s(found) == len(covered)


@given(st.lists(st.sets(st.integers(0, 9), min_size=1, max_size=3), max_size=40), st.integers(3, 10), st.integers(0, 5))
def test_the_limit_counts_what_an_lru_of_whole_experts_misses(demands, slots, first):
    held: list[int] = []
    missed = 0
    for number, keys in enumerate(map(sorted, demands)):
        fresh = [key for key in keys if key not in held]
        held = [key for key in held if key not in keys] + [key for key in keys if key in held]
        held = held[max(0, len(held) + len(fresh) - slots) :] + fresh
        missed += len(fresh) * (number >= first)
    assert figures.lru_misses([sorted(keys) for keys in demands], slots, first) == missed


def test_a_cycle_longer_than_the_slots_never_hits_and_one_slot_more_always_does():
    cycle = [[key] for _ in range(10) for key in range(6)]
    assert figures.lru_misses(cycle, 5, 6) == 54
    assert figures.lru_misses(cycle, 6, 6) == 0
    with pytest.raises(ValueError, match="does not fit"):
        figures.lru_misses([[1, 2, 3]], 2, 0)


def test_fio_beside_an_arm_is_the_best_setting_by_the_mean_before_and_after():
    passes = [{"a": 1.0, "b": 2.0}, {"a": 4.0, "b": 2.4}]
    assert figures.beside(passes) == ("a", 2.5)


def step_records(number: int, disk: float, llama: float = 1.0, **changes) -> list[dict]:
    """A round in which ssd_llama reads at 0.95 of fio's rate and reaches 0.9 of the limit."""
    common = {"round": number, "law": "uniform", "limit": "1GiB", "fio": [{"x": disk}, {"x": disk}]}
    own = {
        "tok_s": 1.8 * disk, "mb_token": 500.0, "busy_s_token": 0.5 / 0.95 / disk, "lru_mb_token": 500.0,
        "overhead_share": 0.04, "requests_token": 190.0, "reads_token": 190.0, "hit_rate": 0.1, **changes,
    }  # fmt: skip
    return [
        {**common, "arm": "ssd_llama", **own},
        {**common, "arm": "ssd_llama/checkpoint", **own, "tok_s": own["tok_s"] / 1.5, "requests_token": 760.0},
        {**common, "arm": "llama.cpp", "tok_s": llama * disk * 0.6, "mb_token": 700.0},
        {**common, "arm": "accelerate", "tok_s": 0.1 * disk, "mb_token": 8000.0},
    ]


def bars(records):
    """Bar to whether it holds."""
    return {found["bar"]: found["holds"] for found in figures.judged(figures.with_disk(records))}


def test_ratios_are_taken_within_a_round_so_a_disk_that_drifts_changes_none():
    steady = [record for number in range(3) for record in step_records(number, 1.0)]
    drifting = [record for number, disk in enumerate((0.5, 1.0, 1.6)) for record in step_records(number, disk)]
    one, other = (figures.judged(figures.with_disk(records)) for records in (steady, drifting))
    for a, b in zip(one, other, strict=True):
        assert a["values"] == pytest.approx(b["values"])
    assert set(bars(drifting).values()) == {True}


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({"busy_s_token": 0.6}, "read rate over fio's best"),
        ({"llama": 2.0}, "tok/s over llama.cpp's"),
        ({"lru_mb_token": 400.0}, "tok/s over the LRU limit"),
        ({"overhead_share": 0.06}, "loop's own share of a step"),
        ({"requests_token": 191.0}, "requests an expert, packed"),
    ],
)
def test_each_bar_can_be_missed(changes, missed):
    found = bars(step_records(0, 1.0, **changes))
    assert [name for name, holds in found.items() if not holds] == [missed]


def test_an_arm_that_failed_is_named_and_its_bars_are_not_measured():
    records = step_records(0, 1.0)
    records[2] = {**records[2], "error": "killed: it needs more memory than the limit"}
    assert bars(records)["tok/s over llama.cpp's"] is None
    text = figures.table(figures.with_disk(records))
    assert "llama.cpp, uniform, 1GiB, round 0: killed" in text
    assert "not measured" in text
    assert "| uniform | 1GiB | llama.cpp |" not in text


def test_the_table_has_a_line_for_each_arm_and_the_gain_of_the_layout():
    text = figures.table(figures.with_disk([r for number in range(3) for r in step_records(number, 1.0 + number)]))
    assert "| uniform | 1GiB | ssd_llama | 3.6 (1.8 to 5.4) |" in text
    assert "tok/s, packed over checkpoint | | uniform | 1GiB | 1.5 (1.5 to 1.5) |" in text


# --- files -----------------------------------------------------------------------------------------------------------


def test_q4_0_blocks_are_the_weights_of_the_codes():
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (2, 3, 128), dtype=np.uint8)
    scales = to_bf16(rng.uniform(0.001, 0.1, (2, 3, 2)).astype(np.float32))
    biases = to_bf16(-8 * from_bf16(scales))
    shifts = 4 * np.arange(8, dtype=np.uint32)
    words = (codes.reshape(2, 3, 16, 8).astype(np.uint32) << shifts).sum(-1, dtype=np.uint32)
    blocks = q4_0(words, scales, biases).reshape(2, 3, 4, 18)
    scale = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32)
    nibbles = np.concatenate([blocks[..., 2:] & 15, blocks[..., 2:] >> 4], axis=-1)  # ggml: j and j + 16 in byte j
    wanted = (codes.astype(np.float32) - 8) * np.repeat(from_bf16(scales), 64, axis=-1)
    assert np.array_equal((nibbles.astype(np.float32) - 8) * scale, wanted.reshape(2, 3, 4, 32))
    with pytest.raises(UsageError, match="no Q4_0"):
        q4_0(words, scales, scales)


def test_names_in_gguf():
    assert gguf_name("model.layers.7.mlp.switch_mlp.down_proj.weight") == "blk.7.ffn_down_exps.weight"
    assert gguf_name("lm_head.weight") == "output.weight"


def test_a_pack_in_another_layout_has_the_same_experts(tmp_path):
    pack = write_random_pack(tmp_path / "packed", 2, 3, 64, 32, QuantSpec("int4", 32))
    rearrange(pack, "checkpoint", tmp_path / "checkpoint")
    other = Pack.open(tmp_path / "checkpoint")
    other.verify()
    assert other.manifest.hashes == pack.manifest.hashes
    assert len(other.segments(0)) > len(pack.segments(0)) == 1


# --- rounds ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def race(tmp_path, monkeypatch):
    """A race whose arms say at once what they would have measured; ``calls`` are the arms in order."""
    calls = []

    def one(race, step, arm):
        calls.append((step.round, step.law, step.limit, arm))
        if len(calls) == one.stop_at:
            raise KeyboardInterrupt
        return next(r for r in step_records(step.round, 1.0) if r["arm"] == arm)

    one.stop_at = 0
    monkeypatch.setattr(rounds, "one", one)
    monkeypatch.setattr(machine, "fio", lambda *_: {"x": 1.0})
    monkeypatch.setattr(machine, "drop_caches", lambda: None)
    monkeypatch.setattr(machine, "refusal", lambda: None)
    monkeypatch.setattr(machine, "readahead_kib", lambda path: 128)
    monkeypatch.setattr(out_of_core, "prepare", lambda race: None)
    for law in ("uniform", "zipf"):
        write_random_pack(tmp_path / f"{law}-packed", 1, 2, 64, 32, QuantSpec("int4", 32))
    one.words = [f"folder={tmp_path}", "limits=1GiB,2GiB", "rounds=2", "arms=ssd_llama,ssd_llama/checkpoint,llama.cpp"]
    one.calls = calls
    return one


def document(text):
    """The last line of what a command prints."""
    return json.loads(text.strip().splitlines()[-1])


def test_a_race_that_was_stopped_goes_on_with_the_step_it_was_in(race, capsys):
    race.stop_at = 8
    with pytest.raises(KeyboardInterrupt):
        out_of_core.main(race.words)
    race.stop_at = 0
    before = len(race.calls)
    assert out_of_core.main(race.words) == 0
    assert len(race.calls) - before == 24 - 6  # two whole steps of three arms were kept
    done = set(race.calls)
    assert len(done) == 24
    out_of_core.main(race.words)
    assert len(race.calls) - before == 18  # nothing is left to do
    assert len(document(capsys.readouterr().out)["bars"]) == 4 * len(figures.BARS)


def test_minutes_end_a_turn_between_two_steps(race, monkeypatch):
    clock = iter(range(0, 10**6, 40))
    monkeypatch.setattr(out_of_core.time, "monotonic", lambda: next(clock))
    out_of_core.main([*race.words, "minutes=1"])
    assert len(race.calls) == 3


def test_a_race_goes_on_with_the_settings_it_began_with(race, capsys):
    out_of_core.main([*race.words[:2], "rounds=1", race.words[3]])
    assert out_of_core.main([*race.words, "tokens=9"]) == 2
    assert "another tokens" in capsys.readouterr().err
    assert out_of_core.main(race.words) == 0  # more rounds are the same race


def test_all_arms_of_a_step_get_the_same_tokens_and_steps_differ_in_order():
    assert rounds.tokens(40)[:20] == rounds.tokens(18)
    assert len(set(rounds.tokens(40))) > 30


@pytest.mark.parametrize("word", ["arms=vllm", "rounds=0", "limits=0.5GiB", "colour=red"])
def test_wrong_words_are_one_line(race, word, capsys):
    words = [w for w in race.words if w.partition("=")[0] != word.partition("=")[0]]
    assert out_of_core.main([*words, word]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_what_a_child_says_and_what_became_of_it():
    run = [sys.executable, "-c"]
    assert machine.child([*run, "print('noise'); print('{\"a\": 1}')"], None, {}) == {"a": 1}
    assert machine.child([*run, "raise SystemExit('no such model')"], None, {}) == {"error": "no such model"}
    assert "longer" in machine.child([*run, "import time; time.sleep(9)"], None, {}, 0.2)["error"]
    assert "memory" in machine.child([*run, "import os; os.kill(os.getpid(), 9)"], None, {})["error"]
