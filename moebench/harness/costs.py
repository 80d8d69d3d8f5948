"""From a hardware profile and a geometry to the seconds of each operation; every formula of the time model stands
here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from moebench.geometry import Geometry
from moebench.hardware import HardwareProfile, Stack
from moebench.store.extents import WHOLE, Extents
from moebench.store.layout import QuantSpec
from moebench.store.overlay import WRITE_UNIT_BYTES
from moebench.store.random_parts import coded_bytes as random_coded_bytes
from moebench.store.random_parts import random_specs
from moebench.timeline.costs import Costs
from moebench.units import GB, GIB, KIB, MIB, PAGE, align_up

DIRECT = ("direct", "uring")  # engines that read past the page cache
QUEUE_DEPTH = 32  # reads that an asynchronous engine keeps in flight at most
BLOCK_BYTES = MIB  # demand pre-empts prefetch at this granularity
COMPUTE = (
    "dense_layer_s", "dense_row_s", "head_s", "state_byte_s", "expert_s", "expert_row_s", "layer_floor_s", "byte_s",
    "host_sync_s", "host_expert_s", "host_row_s", "host_trip_s", "on_chip_s", "pass_s", "cold_s", "again_s", "beside_s",
    "adapters_s", "live_layer_s", "live_load_s", "dispatch_s", "gather_s",
)  # fmt: skip
KERNELS_BESIDE = ("compute.beside_reads", "storage.read_beside_compute")
READ_BESIDE_LAYERS = "storage.read_beside_layers"
CHIP_ACTIVATIONS = 128 * KIB  # of on-chip memory; the rest is two buffers for weights (arXiv 2609.14643, section 4.4)


@dataclass(frozen=True)
class StorageUse:
    """How experts lie on storage and how they are read: pieces per expert, bytes of each, page cache or not.

    ``in_place``: the system computes on the mapping itself and loads nothing into slots. ``whole``: a piece is one
    request, which nothing overtakes. ``stored_bytes``: of an expert that is stored compressed, 0 where none is.
    """

    pieces: tuple[int, ...]  # bytes of each separate read that one expert takes
    engine: str
    page_cache_bytes: int = 0
    in_place: bool = False
    whole: bool = False
    stored_bytes: int = 0


def pieces(geometry: Geometry, layout: str, engine: str, own: Extents | None = None) -> tuple[int, ...]:
    """Bytes of each separate read of one expert, as a random pack of this geometry stores it in ``layout``, or as
    ``own`` does, a pack of other parts.

    One aligned extent of whole pages, or what is scattered: in a checkpoint weight, scales and biases of each of the
    three projections (9 ranges at int4, 3 at 16 bits), as in a GGUF file each projection (3 ranges).
    """
    if layout in WHOLE:
        return (geometry.slot_bytes,)
    if own is None:
        parts = random_specs(geometry.hidden, geometry.intermediate, QuantSpec(geometry.quant, geometry.group))
        own = Extents(layout, geometry.layers, geometry.experts, parts)
    # Direct reads move whole pages; a piece that starts anywhere touches half a page more on average at either end.
    beyond = PAGE if engine in DIRECT else 0
    return tuple(align_up(piece.nbytes) if piece.aligned else piece.nbytes + beyond for piece in own.pieces)


def coded_bytes(geometry: Geometry) -> int:
    """Bytes that a random expert of this geometry takes under codec ``rans``."""
    return random_coded_bytes(geometry.hidden, geometry.intermediate, QuantSpec(geometry.quant, geometry.group))


def request_seconds(profile: HardwareProfile) -> Callable[[int, int], float]:
    """Service time of one request by its bytes and the requests in flight."""
    return lambda nbytes, depth: nbytes / (profile.read_gb_s(nbytes, depth) * GB)


def build(
    profile: HardwareProfile,
    geometry: Geometry,
    use: StorageUse,
    dense_bits: float | None = None,
    stack_name: str = "",
    adapter_bytes: int = 0,
    adapters: int = 0,
    tiers: int = 1,
    on_host: bool = False,
) -> Costs:
    """Costs of one run.

    ``adapter_bytes`` stream beside the dense weights, and each of ``adapters`` takes the library's time where that was
    measured. Two ``tiers`` on one memory copy within it; ``on_host``: the host's processor computes experts too.
    Storage: an expert takes the sum over its pieces of piece / bandwidth(piece size, depth); an mmap engine faults one
    readahead window at a time from one thread. Compute: a layer streams its dense weights once a pass and each active
    expert once, or is bound by arithmetic, and takes no less than the software stack's floor; each load costs the host
    its time.
    """
    stack = profile.constants(stack_name)
    device_bw = profile.device_gb_s * GB
    bits = dense_bits or geometry.bits_per_weight
    flops = (profile.int4_tflops if geometry.quant == "int4" else profile.bf16_tflops) * 1e12
    head_parameters = geometry.vocabulary * geometry.hidden
    embeddings = head_parameters * (1 if geometry.tied else 2)  # the input embedding is looked up, not streamed
    layer_parameters = max(0, geometry.dense_parameters - embeddings) / geometry.layers
    read_bytes, read_s = sum(use.pieces), _read_s(profile, use)
    loads = not use.in_place or stack.step_us > 0  # a loop that was measured goes through every expert all the same
    unified, chip = profile.unified, profile.declares("bandwidth.on_chip_gb_s")
    within = 2 / (profile.dram_gb_s * GB) if tiers == 2 else 0.0  # a copy in one memory reads and writes
    up, down = (within, within) if unified else (1 / (profile.h2d_gb_s * GB), 1 / (profile.d2h_gb_s * GB))
    return Costs(
        read_bytes=read_bytes,
        expert_bytes=geometry.expert_bytes,
        read_s=read_s,
        block_s=(1.0 if use.whole else min(1.0, BLOCK_BYTES / read_bytes)) * read_s[1],
        load_host_s=stack.per_load_ms * 1e-3 if loads else 0.0,
        cached_s=_cached_s(profile, geometry, use),
        page_cache_bytes=0 if use.engine in DIRECT else use.page_cache_bytes,
        copy_s=geometry.expert_bytes * up,
        copy_back_s=geometry.expert_bytes * down,
        copy_latency_s=0.0 if unified else profile.link_latency_us * 1e-6,
        dense_layer_s=(layer_parameters * bits / 8 + adapter_bytes / geometry.layers) / device_bw,
        dense_row_s=2 * layer_parameters / (profile.bf16_tflops * 1e12),
        head_s=head_parameters * bits / 8 / device_bw,
        state_byte_s=1.0 / geometry.layers / device_bw,
        expert_s=geometry.expert_bytes / device_bw,
        expert_row_s=geometry.expert_flops_per_row() / flops,
        layer_floor_s=stack.layer_floor_us * 1e-6,
        host_sync_s=stack.host_sync_us * 1e-6,
        byte_s=1.0 / device_bw,
        requests=len(use.pieces),
        request_s=request_seconds(profile),
        decode_s=geometry.expert_bytes / (profile.rans_gb_s * GB) if use.stored_bytes else 0.0,
        copy_coded_s=use.stored_bytes * up,
        map_s=profile.map_us * 1e-6 if profile.declares("storage.map_us") else 0.0,
        on_chip_s=geometry.expert_bytes / (profile.on_chip_gb_s * GB) if chip else 0.0,
        chip_parts=_chip_parts(geometry, profile.on_chip_mib) if chip else 1,
        tile_rows=int(profile.tile_rows) if chip else 1,
        host_expert_s=geometry.expert_bytes / (profile.dram_gb_s * GB) if on_host else 0.0,
        host_row_s=geometry.expert_flops_per_row() / (profile.cpu_tflops * 1e12) if on_host else 0.0,
        write_unit_bytes=WRITE_UNIT_BYTES,
        write_unit_s=WRITE_UNIT_BYTES / (profile.write_gb_s * GB),
        host_trip_s=0.0 if unified or not on_host else 2 * profile.link_latency_us * 1e-6,
        **_measured_s(stack, adapters / geometry.layers),
        library_s=_library_s(profile, geometry),
        expert_rows_s=_expert_rows_s(profile, geometry),
        experts_beside=_experts_beside(profile, geometry),
        reads_beside_layers=_declared(profile, READ_BESIDE_LAYERS),
        ahead_s=_ahead_s(profile, use),
        limit_byte_s=1 / (profile.limit_gb_s * GB) if profile.declares("storage.limit_gb_s") else 0.0,
        around_bytes=int(profile.readahead_kib * KIB / 2)
        if "reads.mmap" in profile.curves and use.engine == "mmap"
        else 0,
    )


def reads_only(costs: Costs) -> Costs:
    """The costs of a run in which nothing computes: what storage, link and loop take is left."""
    nothing = dict.fromkeys(COMPUTE, 0.0)
    return replace(costs, **nothing, library_s=None, expert_rows_s=None)


def _read_s(profile: HardwareProfile, use: StorageUse) -> tuple[float, ...]:
    """Service times of one expert's demand reads by queue depth; the first is not used."""
    depths = range(1, QUEUE_DEPTH + 1)
    if use.engine == "mmap" and "reads.mmap" not in profile.curves:
        window = max(profile.page_kib, profile.readahead_kib) * KIB
        faults = sum(-(-piece // window) for piece in use.pieces)
        beyond = (min(window, max(use.pieces)) - profile.page_kib * KIB) / (profile.read_gb_s(window, 1) * GB)
        cold = faults * (profile.page_fault_us * 1e-6 + max(0.0, beyond))  # a fault's time includes its page
        return (0.0, *[cold] * len(depths))
    curve = profile.curves.get(f"reads.{use.engine}", profile.read_curve)
    return (0.0, *[sum(p / (curve.gb_s(p, d) * GB) for p in use.pieces) for d in depths])


def _measured_s(stack: Stack, adapters: float) -> dict[str, float]:
    """What was measured of moebench's own loop and library, with so many ``adapters`` in a layer."""
    micros = {
        "step_s": stack.step_us, "layer_s": stack.layer_us, "demand_s": stack.request_us, "wait_s": stack.wait_us,
        "hook_s": stack.hook_us, "live_layer_s": stack.live_layer_us, "live_load_s": stack.live_load_us,
        "pass_s": stack.pass_us, "cold_s": stack.cold_us, "again_s": stack.again_us, "beside_s": stack.beside_us,
        "dispatch_s": stack.expert_us, "gather_s": stack.gather_us, "adapters_s": stack.adapter_us * adapters,
    }  # fmt: skip
    return {name: us * 1e-6 for name, us in micros.items()}


def _cached_s(profile: HardwareProfile, geometry: Geometry, use: StorageUse) -> float:
    """Seconds of one read of a layer's demand that the page cache serves: as measured, or a copy."""
    nbytes = sum(use.pieces)
    if (curve := profile.curves.get(f"cached.{use.engine}")) is not None:
        return nbytes / (curve.gb_s(nbytes, geometry.top_k) * GB)
    return 2 * nbytes / (profile.dram_gb_s * GB)


def _ahead_s(profile: HardwareProfile, use: StorageUse) -> tuple[float, ...]:
    """Service times of prefetches by queue depth; none where they were not measured with this engine."""
    if "ahead" not in profile.curves or use.engine != profile.engine:
        return ()
    rate = profile.curves["ahead"].gb_s
    return (0.0, *[sum(p / (rate(p, depth) * GB) for p in use.pieces) for depth in range(1, QUEUE_DEPTH + 1)])


def _library_s(profile: HardwareProfile, geometry: Geometry) -> Callable[[int, int], float] | None:
    """What a layer without its experts takes of the library, by bytes of cache and rows; the curves count tokens.

    A pass that leaves no more tokens in the cache than it has rows begins its sequences.
    """
    if "layers" not in profile.curves:
        return None
    later, first = profile.curves["layers"], profile.curves.get("first_layers")
    each, fixed = max(1, geometry.kv_bytes_per_token), geometry.fixed_state_bytes

    def seconds(state_bytes: int, rows: int) -> float:
        tokens = max(1.0, (state_bytes - 2 * fixed) / each)
        return first.seconds(1, rows) if first is not None and tokens <= rows else later.seconds(tokens, rows)

    return seconds


def _declared(profile: HardwareProfile, name: str) -> float:
    """A share that a profile may declare; all of it where it does not."""
    return min(1.0, profile.number(name)) if profile.declares(name) else 1.0


def _experts_beside(profile: HardwareProfile, geometry: Geometry) -> tuple[float, float]:
    """What experts and reads keep of their speeds beside each other. What the smallest expert takes is the library's,
    which is charged for the reads that land; the rest goes as kernels do.
    """
    curve = profile.curves.get(f"experts.{geometry.quant}")
    kernels, layers = (
        (_declared(profile, name) for name in KERNELS_BESIDE),
        (1.0, _declared(profile, READ_BESIDE_LAYERS)),
    )
    own = 0.0
    if curve is not None:
        own = min(1.0, curve.seconds(curve.xs[0], 1) / curve.seconds(geometry.expert_bytes / KIB, 1))
    work, reads = (1 / (own / layer + (1 - own) / kernel) for layer, kernel in zip(layers, kernels, strict=True))
    return work, reads


def _expert_rows_s(profile: HardwareProfile, geometry: Geometry) -> Callable[[float], float] | None:
    """What one expert takes by the rows it computes on, where that was measured."""
    curve = profile.curves.get(f"experts.{geometry.quant}")
    kib = geometry.expert_bytes / KIB
    return None if curve is None else cache(lambda rows: curve.seconds(kib, max(1.0, rows)))


def _chip_parts(geometry: Geometry, on_chip_mib: float) -> int:
    """Equal pieces in which one expert passes through a weight buffer, half of what activations leave of the chip."""
    return math.ceil(geometry.expert_bytes / ((on_chip_mib * MIB - CHIP_ACTIVATIONS) / 2))


def page_cache_bytes(profile: HardwareProfile, held_bytes: int) -> int:
    """RAM that the operating system can use as page cache: all of it less the ledger and the declared reserve."""
    return max(0, int((profile.ram_gib - profile.reserve_gib) * GIB) - held_bytes)
