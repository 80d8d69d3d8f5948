"""``moebench doctor io``: what it reads, at how many at a time, what it says and what it refuses."""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future

import numpy as np
import pytest

from moebench.cli import main
from moebench.commands import doctor_io
from moebench.commands.compose import register_groups, resolve
from moebench.commands.doctor_io import best
from moebench.plugins import load_plugins
from moebench.store import steady
from moebench.store.engines import StoreError
from moebench.store.pages import aligned_buffer
from moebench.store.steady import Flow, Passes, Setting, measure
from moebench.store.writer import write_random_pack

FEW = ("gib=0.01", "seconds=0.2", "depths=1,3")


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    """Forty experts of a few pages."""
    return write_random_pack(tmp_path_factory.mktemp("pack") / "pack", 1, 40, 128, 64)


class Counting:
    """An engine that answers later, from a thread, and counts what is on its way."""

    def __init__(self, pack, fail_at=None):
        self.pack, self.fail_at = pack, fail_at
        self.now = self.most = self.asked = 0
        self.lock = threading.Lock()

    def submit(self, key, buffer, priority):
        with self.lock:
            self.now, self.asked = self.now + 1, self.asked + 1
            self.most = max(self.most, self.now)
            failing = self.asked == self.fail_at
        future: Future[int] = Future()

        def answer():
            with self.lock:
                self.now -= 1
            if failing:
                future.set_exception(StoreError("no"))
            else:
                future.set_result(1)

        threading.Timer(0.001, answer).start()
        return future


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_so_many_are_on_their_way_and_no_more(pack, depth):
    engine = Counting(pack)
    flow = Flow(engine, range(40), [np.zeros(1)] * depth, 60.0)
    flow.run()
    assert (engine.most, engine.asked, engine.now) == (depth, 40, 0)
    assert len(flow.latency_s) == 40
    assert min(flow.latency_s) >= 0.001


def test_a_read_that_fails_ends_the_pass_with_its_error(pack):
    engine = Counting(pack, fail_at=7)
    with pytest.raises(StoreError, match="no"):
        Flow(engine, range(40), [np.zeros(1)] * 2, 60.0).run()
    assert engine.asked < 12
    assert engine.now == 0


def test_time_ends_a_pass(pack):
    engine = Counting(pack)
    Flow(engine, iter(int, 1), [np.zeros(1)] * 2, 0.05).run()
    assert engine.asked < 200


def test_throughput_is_bytes_over_time(pack):
    with steady.open_engine("pread", pack, threads=2) as engine:
        flow = Flow(engine, range(40), [aligned_buffer(pack.slot_bytes) for _ in range(2)], 60.0)
        gb_s = flow.run()
        assert engine.requests == 40
    assert gb_s * 1e9 * (flow._ended - flow._started) == pytest.approx(40 * pack.expert_bytes)


def test_an_engine_that_cannot_read_is_named_and_the_others_are_measured(pack, monkeypatch):
    monkeypatch.setattr(steady, "drop_page_cache", lambda path: (False, "no fadvise"))
    settings = [Setting("pread", 2), Setting("mmap", 1), Setting("direct", 2)]
    found, refused = measure(pack, settings, 0.02)
    assert list(found) == [Setting("direct", 2)]
    assert set(refused) == {"pread", "mmap"}
    assert "no fadvise" in refused["pread"]
    assert len(found[Setting("direct", 2)].gb_s) == 3


def test_the_page_cache_is_empty_before_each_pass_and_no_expert_comes_twice(pack, monkeypatch):
    dropped, asked = [], []
    monkeypatch.setattr(steady, "drop_page_cache", lambda path: (dropped.append(path) or True, ""))
    flow_init = Flow.__init__
    monkeypatch.setattr(
        Flow, "__init__", lambda self, e, keys, b, s: flow_init(self, e, asked.append(list(keys)) or asked[-1], b, s)
    )
    measure(pack, [Setting("pread", 2)], 5.0)
    assert len(dropped) == 3
    assert all(sorted(keys) == list(range(40)) for keys in asked)


def test_the_best_is_the_least_deep_of_those_that_are_as_fast():
    gave = {("direct", 1): 0.5, ("direct", 4): 0.97, ("uring", 4): 1.0, ("direct", 8): 0.99, ("uring", 2): 0.94}
    found = {Setting(*setting): Passes([gb_s]) for setting, gb_s in gave.items()}
    assert best(found) == Setting("direct", 4)
    assert best({Setting("direct", 1): Passes([0.96]), Setting("uring", 8): Passes([1.0])}) == Setting("direct", 1)
    assert best({Setting("direct", 1): Passes([0.94]), Setting("uring", 8): Passes([1.0])}) == Setting("uring", 8)


def test_a_table_and_words_that_a_run_takes(tmp_path, capsys, monkeypatch):
    seen = []
    monkeypatch.setattr(doctor_io, "measure", lambda pack, *rest: seen.append(pack.slot_bytes) or measure(pack, *rest))
    assert main(["doctor", "io", f"path={tmp_path}", "bytes=100KiB", "engines=direct", *FEW]) == 0
    lines = capsys.readouterr().out.splitlines()
    document = json.loads(lines[-1])
    assert seen == [100 * 1024]
    assert [(row["engine"], row["depth"]) for row in document["rows"]] == [("direct", 1), ("direct", 3)]
    assert all(row["gb_s"] > 0 and 0 < row["p50_ms"] <= row["p99_ms"] for row in document["rows"])
    assert document["best"] in lines[-2]
    registry = load_plugins()
    register_groups(registry)
    config = resolve(["hw=m4pro", *document["best"].split()], registry)
    assert (config.engine, config.depth) in {("direct", 1), ("direct", 3)}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("layout", "reads"), [("packed", 1), ("scattered", 3), ("checkpoint", 9)])
def test_a_layout_reads_as_often_as_it_must(tmp_path, capsys, layout, reads):
    words = [f"path={tmp_path}", "model=qwen3-30b-a3b", f"layout={layout}", "engines=direct", *FEW]
    assert main(["doctor", "io", *words]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["reads"] == reads


def test_a_pack_is_read_as_it_lies(pack, capsys):
    assert main(["doctor", "io", f"path={pack.path}", "engines=direct", "depths=2", "seconds=0.2"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["expert_bytes"] == pack.expert_bytes
    assert sorted(path.name for path in pack.path.iterdir()) == ["dense.safetensors", "experts.bin", "manifest.json"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "model=NAME or bytes=SIZE"),
        (["model=tinymoe", "bytes=2MiB"], "model=NAME or bytes=SIZE"),
        (["bytes=2MiB", "layout=scattered"], "belong to model="),
        (["bytes=2"], "is not a size"),
        (["bytes=2MiB", "engines=fast"], "direct"),
        (["bytes=2MiB", "depths=0"], "1 to 256"),
        (["bytes=2MiB", "gib=2000"], "0.01 to 1024"),
        (["model=nothing"], "qwen3-30b-a3b"),
    ],
)
def test_what_has_no_meaning_is_one_line(tmp_path, capsys, words, said):
    assert main(["doctor", "io", f"path={tmp_path}", *words]) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.err.count("\n") == 1


def test_a_pack_says_itself_what_it_holds(pack, capsys):
    assert main(["doctor", "io", f"path={pack.path}", "model=tinymoe"]) == 2
    assert "leave out model=" in capsys.readouterr().err


def test_nothing_read_is_a_failure_with_its_reason(pack, capsys, monkeypatch):
    monkeypatch.setattr(steady, "drop_page_cache", lambda path: (False, "no fadvise"))
    assert main(["doctor", "io", f"path={pack.path}", "engines=pread", "depths=1", "seconds=0.2"]) == 1
    shown = capsys.readouterr().out
    assert "not measured: no fadvise" in shown
    assert "best" not in shown
