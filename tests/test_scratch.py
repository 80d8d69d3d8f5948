"""What is in the making has one name, one writer at a time, and no trace once its writer is done, failed or dead."""

from __future__ import annotations

import errno
import os
import signal
import threading

import pytest

from moebench.scratch import beside, own_file, own_folder, whole_file


def died(write) -> None:
    """A child writes and is killed."""
    if not (pid := os.fork()):
        try:
            write()
        finally:
            os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_a_file_is_there_whole_or_not_at_all(tmp_path):
    path = tmp_path / "f"
    with whole_file(path) as file:
        file.write(b"old")
        assert not path.exists()
    assert path.read_bytes() == b"old"
    with pytest.raises(ZeroDivisionError), whole_file(path) as file:
        file.write(b"new" * (1 // 0))
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["f"]


def test_what_a_dead_writer_left_is_taken_over(tmp_path):
    path, folder = tmp_path / "f", tmp_path / "d"

    def writes():
        with own_folder(beside(folder)) as scratch, whole_file(path) as file:
            (scratch / "deep" / "er").mkdir(parents=True)
            (scratch / "left").write_text("x")
            file.write(b"a longer text than the next")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    died(writes)
    assert sorted(os.listdir(tmp_path)) == [".d.new", ".f.new"]
    with own_folder(beside(folder)) as scratch, whole_file(path) as file:
        assert not list(scratch.iterdir())
        (scratch / "kept").write_text("y")
        file.write(b"short")
        scratch.rename(folder)
    assert path.read_bytes() == b"short"
    assert sorted(os.listdir(tmp_path)) == ["d", "f"]
    assert os.listdir(folder) == ["kept"]


@pytest.mark.parametrize("renames", [False, True])
def test_writers_of_one_place_take_turns(tmp_path, renames):
    inside, seen = threading.Lock(), []

    def writer(number):
        for _ in range(20):
            with own_file(tmp_path / ".new") as file:
                assert inside.acquire(blocking=False), "two writers at once"
                file.write(b"%d" % number)
                file.flush()
                seen.append((tmp_path / ".new").read_bytes() == b"%d" % number)
                inside.release()
                if renames:  # from here on the next one may begin
                    os.replace(tmp_path / ".new", tmp_path / "f")

    threads = [threading.Thread(target=writer, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert seen == [True] * 80
    assert os.listdir(tmp_path) == (["f"] if renames else [])


def test_an_error_of_the_disk_says_where(tmp_path):
    with pytest.raises(OSError, match=r"\.f\.new") as caught, whole_file(tmp_path / "f"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(FileNotFoundError), whole_file(tmp_path / "nowhere" / "f"):
        pass
