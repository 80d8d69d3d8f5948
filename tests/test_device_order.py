"""Work on a device's slots gives what doing it in order gives, whenever streams do it; nothing else is waited for."""

from __future__ import annotations

from functools import partial

import pytest
from device_programs import SLOTS, in_order
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_device import HOST, LATE, NOW, RACE, SimDevice, scheduled

from moebench.backends.device import DeviceSlots
from moebench.store.pages import aligned_buffer

BYTES = 64
operations = st.one_of(
    st.tuples(st.just("read"), st.integers(0, SLOTS - 1), st.integers(1, 200)),  # from storage into a host slot
    st.tuples(st.just("up"), st.integers(0, SLOTS - 1), st.integers(0, SLOTS - 1)),
    st.tuples(st.just("down"), st.integers(0, SLOTS - 1), st.integers(0, SLOTS - 1)),
    st.tuples(st.just("compute"), st.integers(0, SLOTS - 1), st.just(0)),
    st.tuples(st.just("use"), st.integers(0, SLOTS - 1), st.just(0)),  # by the host, of what came down
)
programs = st.lists(operations, min_size=1, max_size=24)
choices = st.lists(st.sampled_from([NOW, LATE, RACE]), min_size=1, max_size=12)


def on_device(program, when, make=DeviceSlots):
    """What they see on a device whose streams work ``when`` they like."""
    device = SimDevice(when, at=HOST)
    slots = make(device, aligned_buffer)
    card, host = slots.tier("device", SLOTS, BYTES), slots.tier("host", SLOTS, BYTES)
    host[:] = 0
    seen: list[int | None] = []

    def look(index, data):
        values = data.unique().tolist()
        seen[index] = values[0] if len(values) == 1 else -1

    try:
        for what, a, b in program:
            if what == "read":
                slots.host_writes([("host", a)])
                host[a] = b
            elif what == "up":
                slots.upload(("host", a), ("device", b), BYTES)
            elif what == "down":
                slots.download(("device", a), ("host", b), BYTES)
            elif what == "compute":
                seen.append(None)
                card[a].compute(partial(look, len(seen) - 1, card[a].data))
            else:
                seen.append(int(host[a, 0]))
        device.compute.join()
        slots.close()
        assert not device.pinned
    finally:
        device.close()
    return seen


@settings(max_examples=120)
@given(programs, choices)
def test_any_order_of_streams_gives_what_order_gives(program, when):
    assert on_device(program, scheduled(when)) == in_order(program)


class Fill(DeviceSlots):
    """Lets work begin before the slot that it reads is filled."""

    def _before(self, reads, writes):
        return super()._before((), writes)


class Reuse(DeviceSlots):
    """Fills a slot while what was issued still reads it."""

    def _before(self, reads, writes):
        return super()._before((*reads, *writes), ())


class Host(DeviceSlots):
    """Reads from storage into a host slot that is still being copied up."""

    def host_writes(self, places):
        pass


LOAD = [("read", 0, 7), ("up", 0, 1), ("compute", 1, 0)]
PLANTED = {
    "a compute that does not wait for its copy": (Fill, LOAD, "up"),
    "a copy down that does not wait for the copy up": (Fill, [*LOAD[:2], ("down", 1, 2), ("use", 2, 0)], "up"),
    "a slot filled before it was computed on": (Reuse, [*LOAD, ("read", 2, 9), ("up", 2, 1), LOAD[2]], "compute"),
    "a host slot read into before it was copied": (Host, [*LOAD[:2], ("read", 0, 9), LOAD[2]], "up"),
}  # fmt: skip


@pytest.mark.parametrize("fault", PLANTED)
def test_a_missing_wait_shows(fault):
    make, program, slow = PLANTED[fault]

    def when(stream, index):
        return LATE if stream == slow else NOW

    assert on_device(program, when) == in_order(program)
    assert on_device(program, when, make) != in_order(program)


def test_who_computes_waits_for_no_other_copy():
    device = SimDevice(lambda stream, index: LATE if stream == "up" else NOW, at=HOST)
    try:
        slots = DeviceSlots(device, aligned_buffer)
        card, host = slots.tier("device", 2, BYTES), slots.tier("host", 2, BYTES)
        host[:] = 5
        for at in (0, 1):
            slots.upload(("host", at), ("device", at), BYTES)
        card[0].compute(lambda: None)
        assert [slot.data.unique().tolist() for slot in card] == [[5], [255]]
        slots.host_writes([("host", 0)])
        assert card[1].data.unique().tolist() == [255]
        slots.close()
        assert all(slot.data is None for slot in card)
    finally:
        device.close()


def test_an_error_on_a_stream_reaches_who_waits():
    device = SimDevice(lambda stream, index: LATE, at=HOST)
    try:
        slots = DeviceSlots(device, aligned_buffer)
        slots.tier("device", 1, BYTES)[0].compute(lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            device.compute.join()
    finally:
        device.close()
