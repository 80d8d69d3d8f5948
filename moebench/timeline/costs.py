"""What operations cost on a modeled machine: plain seconds per operation, worked out once per run.

Built from a hardware profile and a model geometry by ``harness``; knows neither.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moebench.units import KIB


def _not_given(nbytes: int, depth: int) -> float:
    raise AssertionError("costs without request_s know no request of several neighbours")


@dataclass(frozen=True)
class Costs:
    """Seconds and bytes of every operation the virtual clock can be asked for.

    ``read_s[d]`` is the service time of one whole-expert read with ``d`` reads outstanding (index 0 unused), so that
    throughput at depth d is ``read_bytes / read_s[d]``; ``block_s`` is how long a prefetch block that is already on the
    device keeps a demand read waiting. ``cached_s`` is the cost of a read that the page cache serves, and
    ``page_cache_bytes`` its size (0 for engines that bypass it). ``load_host_s`` is what issuing one load costs the
    host. ``copy_s`` brings an expert to the device, ``copy_back_s`` back to the host.

    ``dense_layer_s`` and ``head_s`` stream the dense weights of a layer and of the head; ``dense_row_s`` is the
    arithmetic of one row in one layer; ``state_byte_s`` one layer's share of a byte of cache and recurrent state;
    ``byte_s`` streams one byte of a system's own work; ``layer_floor_s`` the least time a layer takes in the software
    stack.

    ``requests`` are the storage requests that one expert takes, and ``request_s(nbytes, depth)`` is the service time of
    one that reads several neighbours. ``decode_s`` expands one compressed expert (0: stored as computed on), whose
    ``copy_coded_s`` is the way up. ``host_expert_s`` and ``host_row_s`` are ``expert_s`` and ``expert_row_s`` on the
    host's own processor, ``host_trip_s`` what a layer's activations take there and back. Writes to storage come in
    units of ``write_unit_bytes``, of ``write_unit_s`` seconds each.

    What a measured machine says besides, 0 or None where it says nothing: the loop's own time for a pass
    (``step_s``), a layer (``layer_s``), an expert that a layer demands (``demand_s``), a layer that waits
    (``wait_s``) and a hook of the system (``hook_s``), and what a layer and a load take longer where a model computes
    (``live_layer_s``, ``live_load_s``); what the library takes of a pass beside its layers
    (``pass_s``), of a layer (``library_s(state_bytes, rows)``, in which its floor is), of the first wait in a layer
    (``cold_s``), of each further one (``again_s``), of each read that lands while it computes (``beside_s``), of the
    adapters in a layer (``adapters_s``), of one expert on so many rows (``expert_rows_s``, instead of ``expert_s`` and
    ``expert_row_s``), and of each expert beside that on one row (``dispatch_s``) or on several (``gather_s``);
    ``experts_beside`` are the shares of their speed that experts keep while storage reads, and that reads keep then;
    beside all else that computes reads keep ``reads_beside_layers``. ``ahead_s[d]`` is ``read_s[d]`` of prefetches that
    keep the queue at ``d``, a fault brings the experts of ``around_bytes`` on either side, and ``limit_byte_s`` is what
    a limit on the rate of reads allots to a byte.

    On an accelerator that computes out of memory of its own on the chip: ``map_s`` makes an expert that arrived visible
    to it, ``on_chip_s`` copies one in (instead of ``expert_s``) in ``chip_parts`` pieces that each fill a buffer at
    most, and it works on ``tile_rows`` rows at a time.
    """

    read_bytes: int
    expert_bytes: int
    read_s: tuple[float, ...]
    block_s: float
    load_host_s: float
    cached_s: float
    page_cache_bytes: int
    copy_s: float
    copy_back_s: float
    copy_latency_s: float
    dense_layer_s: float
    dense_row_s: float
    head_s: float
    state_byte_s: float
    expert_s: float
    expert_row_s: float
    layer_floor_s: float
    host_sync_s: float
    byte_s: float = 0.0
    requests: int = 1
    request_s: Callable[[int, int], float] = _not_given
    decode_s: float = 0.0
    copy_coded_s: float = 0.0
    host_expert_s: float = 0.0
    host_row_s: float = 0.0
    host_trip_s: float = 0.0
    write_unit_bytes: int = 256 * KIB
    write_unit_s: float = 0.0
    map_s: float = 0.0
    on_chip_s: float = 0.0
    chip_parts: int = 1
    tile_rows: int = 1
    step_s: float = 0.0
    layer_s: float = 0.0
    demand_s: float = 0.0
    wait_s: float = 0.0
    live_layer_s: float = 0.0
    live_load_s: float = 0.0
    hook_s: float = 0.0
    pass_s: float = 0.0
    cold_s: float = 0.0
    again_s: float = 0.0
    beside_s: float = 0.0
    adapters_s: float = 0.0
    dispatch_s: float = 0.0
    gather_s: float = 0.0
    library_s: Callable[[int, int], float] | None = None
    expert_rows_s: Callable[[float], float] | None = None
    experts_beside: tuple[float, float] = (1.0, 1.0)
    reads_beside_layers: float = 1.0
    ahead_s: tuple[float, ...] = ()
    around_bytes: int = 0
    limit_byte_s: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, int | float) and value < 0:
                raise ValueError(f"costs: {name} must not be negative, got {value}")
        if len(self.read_s) < 2 or min(self.read_s[1:]) <= 0:
            raise ValueError("costs: read_s needs a positive service time for depth 1 and above")
