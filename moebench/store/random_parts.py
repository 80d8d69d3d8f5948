"""What random experts are made of: independent draws with the element frequencies that Gaussian weights have once they
are quantised, so that a codec finds in them what it would find in such a model.

Knows the three matrices of an expert and the byte layout ``plain``; no files.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np

from moebench.store.extents import place_parts
from moebench.store.layout import QuantSpec, TensorSpec
from moebench.store.plain import PlainLayout
from moebench.store.quant import quantize

LAW = "independent draws with the element frequencies of Gaussian weights under this quantisation"
SAMPLE_ROWS = 256  # of the Gaussian matrix whose elements are drawn from
ENTRIES = 1 << 16  # of the table that turns 16 random bits into an element


class RandomParts:
    """Draws experts of matrices [intermediate, hidden] (gate, up) and [hidden, intermediate] (down).

    With ``matrices`` 1 the first is all. Raises ``StoreError`` where a matrix cannot be quantised: int4 needs columns
    in multiples of the group.
    """

    def __init__(self, hidden: int, intermediate: int, quant: QuantSpec, matrices: int = 3) -> None:
        self._specs = random_specs(hidden, intermediate, quant, matrices)
        self._tables: dict[str, np.ndarray] = {}
        for name, values, _ in _samples(hidden, intermediate, quant, SAMPLE_ROWS, matrices):
            ordered = np.sort(values, axis=None)
            self._tables[name] = ordered[np.arange(ENTRIES) * ordered.size // ENTRIES]

    def draw(self, generator: np.random.Generator) -> dict[str, np.ndarray]:
        """The parts of one expert by name."""
        from moebench.store.rans_kernels import look_up  # compiled code, which sizes alone do without

        parts = {}
        for spec in self._specs:
            table = self._tables[spec.name]
            count = spec.nbytes // table.itemsize
            places = generator.bit_generator.random_raw(-(-count // 4)).view(np.uint16)
            parts[spec.name] = look_up(table, places[:count]).reshape(spec.shape)
        return parts


def random_specs(hidden: int, intermediate: int, quant: QuantSpec, matrices: int = 3) -> tuple[TensorSpec, ...]:
    """Where the parts of such an expert lie in a slot."""
    shaped = _samples(hidden, intermediate, quant, 1, matrices)
    return place_parts({name: np.broadcast_to(values[:1], shape) for name, values, shape in shaped})


@cache
def coded_bytes(hidden: int, intermediate: int, quant: QuantSpec) -> int:
    """Bytes that such an expert takes under codec ``rans``: one is drawn and coded."""
    from moebench.store.coded import encode

    parts = RandomParts(hidden, intermediate, quant).draw(np.random.Generator(np.random.SFC64(0)))
    specs = place_parts(parts)
    buffer = np.zeros(specs[-1].offset + specs[-1].nbytes, np.uint8)
    for spec in specs:
        buffer[spec.offset : spec.offset + spec.nbytes] = parts[spec.name].reshape(-1).view(np.uint8)
    return encode(specs, buffer).size


def _samples(
    hidden: int, intermediate: int, quant: QuantSpec, rows: int, matrices: int = 3
) -> Iterator[tuple[str, np.ndarray, tuple[int, ...]]]:
    """Each part's name, its values in ``rows`` rows of Gaussian weights, and its shape in the whole matrix."""
    generator, wide, high = np.random.Generator(np.random.SFC64(0)), (intermediate, hidden), (hidden, intermediate)
    for matrix, (every, columns) in (("gate_proj", wide), ("up_proj", wide), ("down_proj", high))[:matrices]:
        weights = generator.standard_normal((rows, columns), np.float32)
        for name, values in PlainLayout().encode(quantize(matrix, weights, quant)).items():
            yield name, values, (every, *values.shape[1:])
