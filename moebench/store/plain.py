"""The byte layout ``plain``: the logical numbers in row order, on any machine. Knows no kernel."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from moebench.store.layout import ByteLayout, LayoutError, LogicalTensor


class PlainLayout(ByteLayout):
    """int4: two nibbles a byte, low first, with ``.scales`` and ``.biases``; int8: with ``.scales``."""

    name = "plain"
    isa = "any"

    def encode(self, tensor: LogicalTensor) -> dict[str, np.ndarray]:
        """Encoded parts by name; raises ``LayoutError`` where an int4 matrix has an odd number of columns."""
        values = tensor.values
        if tensor.kind == "int4":
            if values.shape[1] % 2:
                raise LayoutError(
                    f"tensor {tensor.name}: {values.shape[1]} columns do not fill whole bytes of two int4"
                )
            values = values[:, 0::2] | (values[:, 1::2] << 4)
        parts = {tensor.name: values, f"{tensor.name}.scales": tensor.scale, f"{tensor.name}.biases": tensor.bias}
        return {name: np.ascontiguousarray(part) for name, part in parts.items() if part is not None}

    def decode(self, name: str, kind: str, shape: tuple[int, ...], parts: Mapping[str, np.ndarray]) -> LogicalTensor:
        """The inverse of ``encode``, bit for bit."""
        if kind == "none":
            return LogicalTensor(name, kind, parts[name].reshape(shape))
        if kind == "int8":
            return LogicalTensor(name, kind, parts[name].reshape(shape), parts[f"{name}.scales"])
        values = np.empty(shape, np.uint8)
        values[:, 0::2] = parts[name] & 15
        values[:, 1::2] = parts[name] >> 4
        return LogicalTensor(name, kind, values, parts[f"{name}.scales"], parts[f"{name}.biases"])
