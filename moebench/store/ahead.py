"""Work done ahead of its use by a few threads, handed over in order. Knows nothing of what is made."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")

MOST = 4  # threads: what is made is written by one
MEMORY = 192 << 20  # bytes that may be in the making at once


def workers_for(nbytes: int) -> int:
    """Threads that may each have ``nbytes`` in the making: one at least, no more than processors."""
    return max(1, min(MOST, os.cpu_count() or 1, MEMORY // max(1, nbytes)))


def in_order(make: Callable[[Item], Made], items: Iterable[Item], workers: int) -> Iterator[Made]:
    """``map(make, items)``, with ``workers`` threads at most that many items ahead; alone it starts no thread.

    An error of ``make`` is raised where its item's turn is; nothing further is begun then.
    """
    if workers == 1:
        yield from map(make, items)
        return
    pending: deque[Future[Made]] = deque()
    left = iter(items)
    with ThreadPoolExecutor(workers, thread_name_prefix="moebench-pack") as pool:
        try:
            pending.extend(pool.submit(make, item) for item in islice(left, workers))
            while pending:
                made = pending.popleft().result()
                pending.extend(pool.submit(make, item) for item in islice(left, 1))
                yield made
        finally:
            for future in pending:
                future.cancel()
