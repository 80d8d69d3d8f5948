"""ssd_llama on real packs of random experts: requests, buffers and bytes, on the wall clock and on the modeled one."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from engine_fixtures import make_trace
from ssd_llama_fixtures import ALL, HELD_OUT, SMALL, build, open_replay, options

from moebench.engine.loop import replay
from moebench.engine.windows import replay_steps
from moebench.errors import UsageError
from moebench.geometry import Geometry
from moebench.harness.matrices import by_matrix
from moebench.harness.memory import require_tiers
from moebench.step import DECODE, PREFILL, Routing
from moebench.store.engines import open_engine
from moebench.store.layout import QuantSpec
from moebench.store.pages import aligned_buffer
from moebench.store.writer import write_random_pack
from moebench.systemspec import Handling

PIECES = {"packed": 1, "packed_gate_up": 2, "packed_gate": 3, "scattered": 3}
TRACE = make_trace(60, 2, 10, geometry=SMALL)


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    made, folder = {}, tmp_path_factory.mktemp("packs")

    def pack(layout="packed", codec="none", geometry=SMALL):
        key = (layout, codec, geometry.name)
        if key not in made:
            shape = (geometry.layers, geometry.experts, geometry.hidden, geometry.intermediate, QuantSpec("int4"))
            out = folder / f"{len(made)}"
            made[key] = write_random_pack(out, *shape, layout=layout, codec=codec, matrices=geometry.matrices)
        return made[key]

    return pack


def served(pack, trace=TRACE, geometry=SMALL, **config):
    """The session after a trace, closed."""
    session = open_replay(pack, geometry, **config)
    try:
        replay(trace, session.experts, 1, ALL)
        session.experts.check_integrity()
    finally:
        session.close()
    return session


class Counts:
    """Records of all steps of a session."""

    def __init__(self, session) -> None:
        self.records, inner = [], session.experts.hooks.end_step

        def end_step(step, record, view):
            inner(step, record, view)
            self.records.append((step.phase, record, session.timeline.storage_requests, session.timeline.storage_bytes))

        session.experts.hooks.end_step = end_step


@pytest.mark.parametrize("engine", ["pread", "direct", "uring", "mmap"])
@pytest.mark.parametrize("layout", PIECES)
def test_one_storage_request_per_miss_and_as_many_as_pieces_where_it_is_scattered(packs, engine, layout):
    """By the engine's own count of read calls, step by step; a prompt pass reads each active expert once."""
    few = {"depth": 2} if engine == "uring" else {"threads": 2} if engine != "mmap" else {}
    session = open_replay(packs(layout), SMALL, engine=engine, layout=layout, options=few)
    counts = Counts(session)
    try:
        replay(TRACE, session.experts, 1, ALL)
    finally:
        session.close()
    before = 0
    for phase, record, requests, _ in counts.records:
        assert requests - before == PIECES[layout] * record.demand_reads
        before = requests
        if phase == PREFILL:
            assert record.demand_reads == record.misses
    assert any(phase == DECODE and record.demand_reads for phase, record, *_ in counts.records)


def test_blocks_are_what_whole_reads_leave_out(packs):
    """An engine left to itself cuts a larger expert into blocks; the system's handling does not."""
    large = Geometry("large", layers=1, experts=4, top_k=2, hidden=2048, intermediate=1024, other_parameters=1)
    pack = packs(geometry=large)
    whole = served(pack, make_trace(12, 1, 2, geometry=large), large, engine="direct")
    assert whole.timeline.storage_requests == whole.timeline.engine.requests
    with open_engine("direct", pack) as engine:
        engine.submit(0, aligned_buffer(pack.slot_bytes), 0).result()
        assert engine.calls > 1


@pytest.mark.parametrize("layout", ["packed", "scattered"])
def test_bytes_and_requests_add_up_to_the_rows_numbers(packs, layout):
    """Effective GB/s, MiB and requests a token are the engine's counters over the decode steps, and nothing else."""
    session = open_replay(packs(layout), SMALL, engine="pread", layout=layout)
    counts = Counts(session)
    try:
        replay(TRACE, session.experts, 1, ALL)
    finally:
        session.close()
    numbers = {name: value for name, (value, *_) in session.metrics.numbers().items()}
    decode = [at for at, (phase, *_) in enumerate(counts.records) if phase == DECODE]
    nbytes = sum(counts.records[at][3] - counts.records[at - 1][3] for at in decode)
    requests = sum(counts.records[at][2] - counts.records[at - 1][2] for at in decode)
    seconds = sum(counts.records[at][1].duration_s for at in decode)
    assert numbers["ssd_mib_per_token"] * 2**20 * len(decode) == pytest.approx(nbytes)
    assert numbers["storage_requests_per_token"] * len(decode) == pytest.approx(requests)
    assert numbers["effective_gb_s"] * 1e9 * seconds == pytest.approx(nbytes)


def test_whole_experts_take_fewer_requests_for_the_same_bytes(packs):
    whole, apart = (served(packs(layout), layout=layout, engine="pread") for layout in ("packed", "scattered"))
    assert whole.timeline.storage_bytes == apart.timeline.storage_bytes
    assert 3 * whole.timeline.storage_requests == apart.timeline.storage_requests


def test_the_pack_is_never_written(packs):
    pack = packs()

    def state():
        files = sorted(pack.path.iterdir())
        return [(f.name, f.stat().st_mtime_ns, xxhash.xxh3_64_hexdigest(f.read_bytes())) for f in files]

    before = state()
    served(pack, device_budget="0.4", engine="direct")
    assert state() == before


# --- buffers and slots -------------------------------------------------------------------------------------------


class Buffers:
    """Watches every read and copy of a session: how many are under way, what they fill and what they read from."""

    def __init__(self, session) -> None:
        self.experts, self.timeline = session.experts, session.timeline
        self.most, self.reused, self.starts = 0, [], []
        read, copy = self.timeline.read, self.timeline.copy
        self.copies = {}  # host slot -> the copies out of it

        def reading(keys, slots, tier, priority, together=()):
            if tier == "host":
                for slot in slots:
                    self.reused.append(all(ticket.handle.done() for ticket in self.copies.pop(slot, [])))
            found = read(keys, slots, tier, priority, together)
            self.starts += [("read", ticket) for ticket in found]
            return found

        def copying(key, source, target, after):
            ticket = copy(key, source, target, after)
            if target[0] == "device":
                self.most = max(self.most, len(self.experts.in_flight) + 1)
                self.copies.setdefault(source[1], []).append(ticket)
                self.starts.append(("copy", ticket))
            return ticket

        self.timeline.read, self.timeline.copy = reading, copying


@pytest.mark.parametrize("tiers", ["three", "two"])
@pytest.mark.parametrize("pool", [1, 2, 6])
def test_buffers_are_bounded_and_used_again_only_after_their_copy(packs, pool, tiers):
    """With reads that end late and out of order; every expert that is handed out holds its own bytes."""
    pack, late = packs(), {"inner": "pread", "reorder": 2, "delay_s": 0.0005, "seed": pool}
    session = open_replay(
        pack, SMALL, options(pool=pool, temporary=4, tiers=tiers), engine="faulty", options=late,
        device_budget="0.4",
    )  # fmt: skip
    for tier in session.experts.tiers:
        tier.arena[:] = 0xFF
    watch, plain, handed = Buffers(session), np.empty(pack.slot_bytes, np.uint8), 0
    serve = session.experts.serve

    def serving(layer, hidden, native):
        routing, experts = serve(layer, hidden, native)

        def checked():
            nonlocal handed
            for expert, found in experts:
                pack.read(layer * SMALL.experts + expert, plain)
                assert np.array_equal(found[: pack.expert_bytes], plain[: pack.expert_bytes])
                handed += 1
                yield expert, found

        return routing, checked()

    session.experts.serve = serving
    try:
        replay(make_trace(24, 1, 6, geometry=SMALL), session.experts, 1, ALL)
    finally:
        session.close()
    assert handed
    assert 1 <= watch.most <= pool
    assert watch.reused
    assert all(watch.reused)


def test_without_a_bound_more_transfers_are_under_way():
    most = {}
    for pool in (2, 0):
        *_, experts = build(options(pool=pool), slots=64, host=44)
        copy, seen = experts.timeline.copy, []

        def copying(key, source, target, after, copy=copy, seen=seen, experts=experts):
            seen.append(len(experts.in_flight) + 1)
            return copy(key, source, target, after)

        experts.timeline.copy = copying
        replay(HELD_OUT, experts, 1, ALL)
        most[pool] = max(seen)
    assert most[2] == 2 < most[0]


def test_each_copy_starts_when_its_own_read_is_there():
    """On the modeled clock: of one batch the first copy ends before the last read, and each after its own."""
    *_, experts = build(options(pool=0), slots=64, host=44)
    read, copy, reads, copies = experts.timeline.read, experts.timeline.copy, {}, {}

    def reading(keys, slots, tier, priority, together=()):
        found = read(keys, slots, tier, priority, together)
        reads.update(zip(keys, found, strict=True))
        return found

    def copying(key, source, target, after):
        assert after is reads[key]
        copies[key] = copy(key, source, target, after)
        return copies[key]

    experts.timeline.read, experts.timeline.copy = reading, copying
    replay_step(experts)
    assert min(c.done_s for c in copies.values()) < max(r.done_s for r in reads.values())
    assert all(copies[key].done_s > reads[key].done_s for key in copies)


def replay_step(experts):
    """The first step's first layer of the committed trace: a batch of misses."""
    step, rows, new = next(replay_steps(HELD_OUT, 1, ALL))
    experts.begin_request(new)
    experts.begin(step)
    for _ in experts.serve(0, None, Routing(HELD_OUT.experts[rows][:, 0], None))[1]:
        pass


# --- matrices and codecs -----------------------------------------------------------------------------------------


def test_single_matrices_are_grouped_into_one_request_each_expert(packs):
    """A real pack of matrices: every cold expert is three units and one read call, of the same bytes."""
    geometry, trace = by_matrix(SMALL_THIRDS, make_trace(24, 1, 6, geometry=SMALL_THIRDS), "packed", "none")
    pack = packs(geometry=geometry)
    session = served(pack, trace, geometry, knobs=options(granularity="gate", temporary=8), budget="0.9")
    assert pack.expert_bytes * 3 == SMALL_THIRDS.expert_bytes
    assert session.timeline.storage_requests < session.timeline.engine.requests
    assert session.hooks.report()["kept"] > 0


SMALL_THIRDS = Geometry("thirds", layers=2, experts=8, top_k=2, hidden=1024, intermediate=64, other_parameters=1000)


def test_a_compressed_expert_is_one_request_of_fewer_bytes(packs):
    each, trace = {}, make_trace(24, 1, 6, geometry=SMALL_THIRDS)
    for codec in ("none", "rans"):
        pack = packs(codec=codec, geometry=SMALL_THIRDS)
        clock = served(pack, trace, SMALL_THIRDS, codec=codec, engine="direct", budget="2MiB").timeline
        assert clock.storage_requests == clock.engine.requests
        each[codec] = clock.storage_bytes / clock.storage_requests
    assert each["rans"] < each["none"] == SMALL_THIRDS.slot_bytes


def test_units_of_matrices_need_experts_stored_whole():
    for layout, codec in (("scattered", "none"), ("packed", "rans")):
        with pytest.raises(UsageError, match="layout=packed, codec=none"):
            by_matrix(SMALL, TRACE, layout, codec)


def test_options_of_a_host_tier_are_refused_where_there_is_none():
    for handling in (Handling(host_cache=False), Handling(on_host=True)):
        with pytest.raises(UsageError, match="device_budget= splits it"):
            require_tiers("it", handling, two=False, codec="none")
        require_tiers("it", handling, two=True, codec="none")
    with pytest.raises(UsageError, match="use codec=none"):
        require_tiers("it", Handling(on_host=True), two=True, codec="rans")
