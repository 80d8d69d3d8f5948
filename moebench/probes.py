"""Short measurements of this machine: random reads, page faults, memory and matrix products, each with its spread.

Every function returns samples and leaves it to the caller what to make of them. Knows no profile and no experts.
"""

from __future__ import annotations

import mmap
import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moebench.errors import MoebenchError
from moebench.units import GB, MIB, PAGE


@dataclass(frozen=True)
class Samples:
    """Repeated measurements of one quantity."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The value to report."""
        return statistics.median(self.values)

    def spread(self) -> str:
        """Lowest to highest of how many, for the source text."""
        return f"median of {len(self.values)}, {min(self.values):.4g} to {max(self.values):.4g}"


def write_file(path: Path, nbytes: int) -> Samples:
    """Fill ``path`` with random bytes and sync after each 128 MiB; GB/s of each part."""
    # random, because a drive or a file system may store zeros for nothing
    block = np.random.default_rng(0).bytes(16 * MIB)
    rates = []
    with path.open("wb") as file:
        while file.tell() < nbytes:
            start, begun = file.tell(), time.perf_counter()
            while file.tell() < min(nbytes, start + 128 * MIB):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            rates.append((file.tell() - start) / (time.perf_counter() - begun) / GB)
    return Samples(tuple(rates))


def open_direct(path: Path) -> int:
    """Open for reads that bypass the page cache; an error where the system cannot."""
    if hasattr(os, "O_DIRECT"):
        try:
            return os.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError as error:
            raise MoebenchError(
                f"{path.parent}: direct reads are refused ({error.strerror}); choose another dir="
            ) from None
    import fcntl

    if not hasattr(fcntl, "F_NOCACHE"):
        raise MoebenchError(
            "this system has neither O_DIRECT nor F_NOCACHE, so storage cannot be told from the page cache"
        )
    handle = os.open(path, os.O_RDONLY)
    fcntl.fcntl(handle, fcntl.F_NOCACHE, 1)
    return handle


def random_reads(handle: int, file_bytes: int, size: int, depth: int, seconds: float) -> float:
    """GB/s of aligned random reads of ``size`` bytes from ``depth`` threads during ``seconds``."""
    done, deadline = [0] * depth, time.perf_counter() + seconds
    errors: list[OSError] = []

    def work(index: int) -> None:
        draw, buffer = random.Random(index * 7919 + size), mmap.mmap(-1, size)
        try:
            while time.perf_counter() < deadline:
                done[index] += os.preadv(handle, [buffer], draw.randrange((file_bytes - size) // PAGE) * PAGE)
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(depth)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise MoebenchError(f"random reads of {size} bytes failed: {errors[0].strerror}")
    return sum(done) / (time.perf_counter() - begun) / GB


def page_faults(path: Path, count: int = 400) -> Samples:
    """Microseconds of single major faults in a mapping of ``path``, its pages dropped first, without readahead."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        view.madvise(mmap.MADV_RANDOM)
        pages = random.Random(0).sample(range(len(view) // mmap.PAGESIZE), count)
        times = []
        for page in pages:
            begun = time.perf_counter()
            view[page * mmap.PAGESIZE]  # the access is the measurement
            times.append((time.perf_counter() - begun) * 1e6)
    return Samples(tuple(times))


def readahead_kib(path: Path) -> float:
    """What the kernel reads ahead on this file's device; one page where it does not say."""
    device = path.stat().st_dev
    setting = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    return float(setting.read_text()) if setting.exists() else mmap.PAGESIZE / 1024


def memory_copy(repeats: int = 7) -> Samples:
    """GB/s of copying 256 MiB, bytes read plus bytes written."""
    source = np.ones(256 * MIB, np.uint8)
    target = np.empty_like(source)
    return _rates(lambda: np.copyto(target, source), 2 * source.nbytes / GB, repeats)


def bf16_product(repeats: int = 7) -> Samples:
    """TFLOP/s of a bf16 product [512, 2048] x [2048, 2048]."""
    import torch

    left, right = torch.randn(512, 2048, dtype=torch.bfloat16), torch.randn(2048, 2048, dtype=torch.bfloat16)
    return _rates(lambda: left @ right, 2 * 512 * 2048 * 2048 / 1e12, repeats)


def int4_product(rows: int, repeats: int = 7) -> tuple[Samples, Samples]:
    """TFLOP/s, and GB/s of stored weights, of int4 products [rows, 2048] x [2048, 768] over 64 different weights."""
    import torch

    out, inner, group, copies = 768, 2048, 64, 64
    dense = torch.randint(0, 16, (out, inner), dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(dense, 1)
    weights = [packed.clone() for _ in range(copies)]  # more than a cache holds, as experts are
    scales = torch.ones(inner // group, out, 2, dtype=torch.bfloat16)
    x = torch.randn(rows, inner, dtype=torch.bfloat16)

    def product() -> None:
        for weight in weights:
            torch.ops.aten._weight_int4pack_mm_for_cpu(x, weight, group, scales)

    stored = packed.numel() * packed.element_size() + scales.numel() * 2
    flops = _rates(product, copies * 2 * rows * out * inner / 1e12, repeats)
    return flops, Samples(tuple(rate / (2 * rows * out * inner / 1e12) * stored / GB for rate in flops.values))


def rans_decoding(repeats: int = 7) -> Samples:
    """GB/s of decoded bytes with one thread on each core: int4 experts of 3 x 768 x 2048 Gaussian weights."""
    from concurrent.futures import ThreadPoolExecutor

    from moebench.store import coded
    from moebench.store.layout import QuantSpec, TensorSpec
    from moebench.store.plain import PlainLayout
    from moebench.store.quant import quantize

    weights = np.random.default_rng(0).standard_normal((3 * 768, 2048), np.float32)
    parts = PlainLayout().encode(quantize("w", weights, QuantSpec()))
    specs: list[TensorSpec] = []
    for name, part in parts.items():
        offset = specs[-1].offset + specs[-1].nbytes if specs else 0
        specs.append(TensorSpec(name, part.shape, "U8" if part.dtype == np.uint8 else "BF16", offset, part.nbytes))
    decoded = np.concatenate([part.view(np.uint8).reshape(-1) for part in parts.values()])
    stored, cores = coded.encode(specs, decoded), os.cpu_count() or 1
    outs = [np.empty_like(decoded) for _ in range(8 * cores)]
    with ThreadPoolExecutor(cores) as pool:
        return _rates(
            lambda: list(pool.map(lambda out: coded.decode(stored, out), outs)),
            len(outs) * decoded.nbytes / GB,
            repeats,
        )


def small_operation(repeats: int = 7) -> Samples:
    """Microseconds to dispatch one small tensor operation."""
    import torch

    x = torch.ones(64)
    return Samples(tuple(1e6 / rate for rate in _rates(lambda: [x + x for _ in range(1000)], 1000, repeats).values))


def hand_over(count: int = 500) -> Samples:
    """Milliseconds to hand a piece of work to a thread and to have its result back."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        times = []
        for _ in range(count):
            begun = time.perf_counter()
            pool.submit(int).result()
            times.append((time.perf_counter() - begun) * 1e3)
    return Samples(tuple(times))


def _rates(work: Callable[[], object], amount: float, repeats: int) -> Samples:
    work()  # warm: pages touched, kernels chosen
    return Samples(tuple(amount / _timed(work) for _ in range(repeats)))


def _timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def grid(
    handle: int, file_bytes: int, points: Sequence[tuple[int, int]], seconds: float, tick: Callable[[], None]
) -> dict[tuple[int, int], Samples]:
    """Throughput at each (size in bytes, depth): three interleaved passes, ``seconds`` for a point in all."""
    values: dict[tuple[int, int], list[float]] = {point: [] for point in points}
    for _ in range(3):
        for (size, depth), rates in values.items():
            rates.append(random_reads(handle, file_bytes, size, depth, seconds / 3))
            tick()
    return {point: Samples(tuple(rates)) for point, rates in values.items()}
