"""The byte layout ``plain``: the logical numbers in row order, on any machine. Knows no kernel."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from moebench.store.layout import CODE_BITS, ByteLayout, LayoutError, LogicalTensor


class PlainLayout(ByteLayout):
    """Codes of four bits: two a byte, low first; others: one a byte; with ``.scales`` and, if affine, ``.biases``."""

    name = "plain"
    isa = "any"

    def encode(self, tensor: LogicalTensor) -> dict[str, np.ndarray]:
        """Encoded parts by name; raises ``LayoutError`` where a matrix of nibbles has an odd number of columns."""
        values = tensor.values
        if CODE_BITS.get(tensor.kind) == 4:
            if values.shape[1] % 2:
                raise LayoutError(
                    f"tensor {tensor.name}: {values.shape[1]} columns do not fill whole bytes of two {tensor.kind}"
                )
            values = values[:, 0::2] | (values[:, 1::2] << 4)
        parts = {tensor.name: values, f"{tensor.name}.scales": tensor.scale, f"{tensor.name}.biases": tensor.bias}
        return {name: np.ascontiguousarray(part) for name, part in parts.items() if part is not None}

    def decode(self, name: str, kind: str, shape: tuple[int, ...], parts: Mapping[str, np.ndarray]) -> LogicalTensor:
        """The inverse of ``encode``, bit for bit."""
        scale, bias = parts.get(f"{name}.scales"), parts.get(f"{name}.biases")
        if CODE_BITS.get(kind) != 4:
            return LogicalTensor(name, kind, parts[name].reshape(shape), scale, bias)
        values = np.empty(shape, np.uint8)
        values[:, 0::2] = parts[name] & 15
        values[:, 1::2] = parts[name] >> 4
        return LogicalTensor(name, kind, values, scale, bias)
