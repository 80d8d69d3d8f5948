"""What a hostile author might write into a file, and what a reader may answer; shared by the tests of untrusted files.

``MOEBENCH_FUZZ=N`` (``make fuzz``) draws N times as many examples, new ones every time; without it the same few.
"""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from moebench.errors import MoebenchError
from moebench.store.engines import StoreError

TIMES = int(os.environ.get("MOEBENCH_FUZZ", "1"))
NUMBERS = st.one_of(
    st.integers(), st.floats(), st.sampled_from([0, -1, 10**9, 10**30, math.inf, math.nan, 1e308, True])
)
TEXTS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        ["layers", "layers ** layers", "1 / 0", "9" * 400, "1e999", "/etc/passwd", "=", "1 MiB", "-5 GB", "(", "../x"]
    ),
)
PLAIN = st.recursive(  # what JSON holds
    st.one_of(st.none(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=5,
)
VALUES = st.recursive(  # what YAML holds
    st.one_of(st.none(), NUMBERS, TEXTS, st.dates(), st.binary(max_size=4)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.one_of(TEXTS, st.integers()), inner, max_size=3)
    ),
    max_leaves=5,
)
TRICKS = [
    b"",
    b"\x00",
    b"\xff\xfe",
    b"{",
    b"[]",
    b"[" * 20000,
    b"1",
    b"null",
    b'{"a": NaN}',
    b"9" * 5000,
    b"PK\x03\x04",
]


def fuzz(examples: int) -> settings:
    """The settings of a test of so many examples."""
    quiet = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(
        max_examples=examples * TIMES, deadline=None, derandomize=TIMES == 1, database=None, suppress_health_check=quiet
    )


def places(data: Any) -> list[tuple[Any, ...]]:
    """The way to every node of plain data."""
    found: list[tuple[Any, ...]] = []
    entries = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in entries:
        found.append((key,))
        found += [(key, *rest) for rest in places(value)]
    return found


def changed(data: Any, way: tuple[Any, ...], value: Any) -> Any:
    """A copy with one node replaced, or removed where ``value`` is ...; or one more key beside it."""
    data = copy.deepcopy(data)
    node = data
    for key in way[:-1]:
        node = node[key]
    if value is ...:
        del node[way[-1]]
    else:
        node[way[-1]] = value
    return data


@st.composite
def damaged(draw: Any, data: Any, values: Any = VALUES) -> Any:
    """``data`` with one or two nodes that hold something else, or are gone."""
    for _ in range(draw(st.integers(1, 2))):
        ways = places(data)
        if ways:
            data = changed(data, draw(st.sampled_from(ways)), draw(st.one_of(values, st.just(...))))
    return data


@st.composite
def damaged_bytes(draw: Any, content: bytes) -> bytes:
    """``content`` with some bytes overwritten, left out or put in, and perhaps cut short."""
    made = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, max(0, len(made) - 1)))
        made[start : start + draw(st.integers(0, 4))] = draw(st.binary(max_size=4))
    return bytes(made[: draw(st.integers(0, len(made)))] if draw(st.integers(0, 4)) == 0 else made)


def one_line(read: Callable[[], Any]) -> bool:
    """Whether it was understood; what is refused must be so in one short line of moebench's own kind."""
    try:
        read()
    except (MoebenchError, StoreError) as error:
        text = str(error)
        assert text.strip()
        assert "\n" not in text.strip()
        assert len(text) < 5000
        return False
    return True


def split(content: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and tensors' bytes of a safetensors file."""
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def joined(header: Any, tensors: bytes) -> bytes:
    """A safetensors file of any header."""
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + tensors
