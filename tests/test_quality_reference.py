"""The unmodified model is asked once: by whoever comes first, and what it said is checked before it is believed."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import numpy as np
import pytest

from moebench.quality import reference
from moebench.quality.reference import reference_answers


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("MOEBENCH_HOME", str(tmp_path))
    return tmp_path / "cache" / "reference"


def said() -> dict[str, np.ndarray]:
    return {
        "task/a/scores": np.array([1.0, 0.0]),
        "ids": np.arange(6, dtype=np.int32).reshape(2, 3),
        "t": np.array(["x"]),
    }


def refuse() -> dict[str, np.ndarray]:
    raise AssertionError("it was asked again")


def same(found: dict[str, np.ndarray]) -> bool:
    want = said()
    return set(found) == set(want) and all(
        found[name].dtype == want[name].dtype and np.array_equal(found[name], want[name]) for name in want
    )


def test_the_second_one_reads_what_the_first_one_computed(home):
    assert same(reference_answers("k", said))
    assert same(reference_answers("k", refuse))
    with pytest.raises(AssertionError):
        reference_answers("other", refuse)


@pytest.mark.parametrize("at", [0, 16, 40, -1])
def test_a_changed_byte_is_noticed_and_computed_again(at, home, capsys):
    reference_answers("k", said)
    (path,) = home.glob("*.npz")
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    assert same(reference_answers("k", said))
    assert str(path) in capsys.readouterr().err
    assert same(reference_answers("k", refuse))


def test_a_torn_file_is_noticed(home, capsys):
    reference_answers("k", said)
    (path,) = home.glob("*.npz")
    path.write_bytes(path.read_bytes()[:8])
    assert same(reference_answers("k", said))
    assert "damaged" in capsys.readouterr().err


def test_what_fails_leaves_nothing_behind(home):
    with pytest.raises(AssertionError):
        reference_answers("k", refuse)
    assert not list(home.glob("*.npz"))
    assert same(reference_answers("k", said))
    assert not list(home.glob(".*"))


def slowly(folder: str) -> None:
    """Ask, leaving a mark for each computation."""

    def compute() -> dict[str, np.ndarray]:
        Path(folder, f"computed-{time.monotonic_ns()}").touch()
        time.sleep(0.3)
        return said()

    assert same(reference_answers("k", compute))


def test_two_processes_that_want_the_same_compute_it_once(tmp_path):
    context = multiprocessing.get_context("fork")
    both = [context.Process(target=slowly, args=(str(tmp_path),)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    assert len(list(tmp_path.glob("computed-*"))) == 1


def test_other_code_weights_or_questions_have_other_keys(monkeypatch):
    asked = []
    monkeypatch.setattr(reference, "reference_answers", lambda key, compute: asked.append(key) or {})
    monkeypatch.setattr(reference.Native, "of", lambda arrays: arrays)

    class Suite:
        key = "a"

    reference.answers(Path(), {"weights_hash": "1"}, Suite())
    reference.answers(Path(), {"weights_hash": "2"}, Suite())
    Suite.key = "b"
    reference.answers(Path(), {"weights_hash": "1"}, Suite())
    monkeypatch.setattr(reference, "_code", lambda: "changed")
    reference.answers(Path(), {"weights_hash": "1"}, Suite())
    assert len(set(asked)) == 4
