"""io_uring through raw system calls: a ring that takes reads and gives back their results. Knows no expert and no file.

Structures and constants are those of the kernel's ``include/uapi/linux/io_uring.h``; the system call numbers are the
same on x86-64 and arm64. The ring belongs to the thread that made it (IORING_SETUP_SINGLE_ISSUER), and completions are
posted only while that thread is in ``enter`` (IORING_SETUP_DEFER_TASKRUN, Linux 6.1), so that nothing here needs a
memory barrier.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
import sys

import numpy as np

SETUP, ENTER = 425, 426  # system call numbers
GETEVENTS = 1  # IORING_ENTER_GETEVENTS
SINGLE_ISSUER, DEFER_TASKRUN = 1 << 12, 1 << 13
SQES_AT = 0x10000000  # IORING_OFF_SQES
READV = 1  # IORING_OP_READV
LIBC = ctypes.CDLL(None, use_errno=True)
PARAMS = struct.Struct("10I 8IQ 8IQ")  # struct io_uring_params
SQE = struct.Struct("BBHiQQIIQ24x")  # opcode, flags, ioprio, fd, offset, address, length, rw_flags, user_data
CQE = struct.Struct("QiI")  # user_data, result, flags
REFUSALS = {
    errno.EPERM: "io_uring is forbidden here",
    errno.ENOSYS: "this system has no io_uring",
    errno.EINVAL: "this kernel's io_uring is older than Linux 6.1",
}


class Ring:
    """A submission and a completion queue for ``entries`` reads at a time; ``OSError`` where the kernel has none."""

    def __init__(self, entries: int) -> None:
        params = bytearray(PARAMS.pack(0, 0, SINGLE_ISSUER | DEFER_TASKRUN, *[0] * 25))
        raw = (ctypes.c_char * PARAMS.size).from_buffer(params)
        self._fd = _call(SETUP, entries, ctypes.addressof(raw))
        found = PARAMS.unpack(params)
        self.entries, complete = found[0], found[1]
        sq, cq = found[10:19], found[19:28]  # offsets: head, tail, ring_mask, ..., array or cqes
        try:
            size = max(sq[6] + 4 * self.entries, cq[5] + CQE.size * complete)
            self._ring = mmap.mmap(self._fd, size, flags=mmap.MAP_SHARED)
            self._sqes = mmap.mmap(self._fd, SQE.size * self.entries, flags=mmap.MAP_SHARED, offset=SQES_AT)
        except BaseException:
            os.close(self._fd)
            raise
        for i in range(self.entries):  # the queue of indices always stays as it is: entry i is slot i
            struct.pack_into("I", self._ring, sq[6] + 4 * i, i)
        word = ctypes.c_uint32.from_buffer
        self._submit_tail, self._submit_mask = word(self._ring, sq[1]), self.entries - 1
        self._head, self._tail = word(self._ring, cq[0]), word(self._ring, cq[1])
        self._cqes, self._complete_mask = cq[5], complete - 1
        self._queued = 0
        self._in_flight: dict[int, np.ndarray] = {}

    def readv(self, fd: int, buffers: np.ndarray, offset: int, name: int) -> None:
        """Queue a read into ``buffers``, uint64 [n, 2] of address and length (struct iovec).

        At most ``entries`` may be in flight. ``name`` comes back with the result, and is taken until then.
        """
        assert len(self._in_flight) < self.entries, "the ring is full"
        assert name not in self._in_flight, "the name is taken"
        tail = self._submit_tail.value
        at = (tail & self._submit_mask) * SQE.size
        SQE.pack_into(self._sqes, at, READV, 0, 0, fd, offset, buffers.ctypes.data, len(buffers), 0, name)
        self._submit_tail.value = (tail + 1) & 0xFFFFFFFF
        self._queued += 1
        self._in_flight[name] = buffers  # the kernel reads them when they are submitted

    def enter(self) -> list[tuple[int, int]]:
        """Submit what is queued, wait for a completion, and return all there are: names and results of read calls."""
        while self._head.value == self._tail.value:
            try:
                self._queued -= _call(ENTER, self._fd, self._queued, 1, GETEVENTS, None, 0)
            except InterruptedError:
                continue
        done, head = [], self._head.value
        while head != self._tail.value:
            name, result, _ = CQE.unpack_from(self._ring, self._cqes + (head & self._complete_mask) * CQE.size)
            done.append((name, result))
            del self._in_flight[name]
            head = (head + 1) & 0xFFFFFFFF
        self._head.value = head
        return done

    def close(self) -> None:
        """Release the ring; what is in flight is cancelled by the kernel."""
        del self._submit_tail, self._head, self._tail  # exported views would keep the mapping from closing
        self._ring.close()
        self._sqes.close()
        os.close(self._fd)


def refusal() -> str | None:
    """Why there is no usable io_uring here, or None where there is."""
    try:
        Ring(1).close()
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "")
        return f"{REFUSALS.get(error.errno or 0, error.strerror)} ({name})"
    return None


def _call(number: int, *arguments: int | None) -> int:
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    LIBC.syscall.restype = ctypes.c_long
    done = LIBC.syscall(ctypes.c_long(number), *map(ctypes.c_void_p, arguments))  # each as wide as a register
    if done < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return done
