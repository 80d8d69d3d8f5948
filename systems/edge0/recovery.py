"""What would be left of a recovery adapter if it were merged into quantised weights: why it is served beside them.

Numbers on matrices; knows no model and no tensor library.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moebench.store.layout import QuantSpec
from moebench.store.quant import dequantize, quantize


@dataclass(frozen=True)
class Kept:
    """What quantising W + D changed, against the change D that was meant.

    ``share``: cosine^2 of the two, 0..1: how much of what came out is D, at whatever strength.
    ``strength``: <kept, D> / <D, D>: how strong D came out. 1 on average where W lies between quantisation steps
    (rounding is then noise around D), less where W lies on them.
    ``error``: |kept - D| / |D|: 0 served unmerged, 1 if nothing is kept, more if rounding adds more than it keeps.
    """

    share: float
    strength: float
    error: float


def kept_by_requantising(weight: np.ndarray, a: np.ndarray, b: np.ndarray, scale: float, spec: QuantSpec) -> Kept:
    """What quantise(W + D) - quantise(W) keeps of D = scale * B A; W [out, in], A [r, in], B [out, r], D not all zero.

    For an adapter that was trained beside quantised weights, W are the numbers those stand for.
    """
    weight = np.asarray(weight, np.float32)
    change = np.float32(scale) * (np.asarray(b, np.float32) @ np.asarray(a, np.float32))
    before, after = (dequantize(quantize("weight", w, spec)) for w in (weight, weight + change))
    kept, change = (after - before).astype(np.float64), change.astype(np.float64)
    along, meant, came = (float((x * y).sum()) for x, y in ((kept, change), (change, change), (kept, kept)))
    return Kept(
        share=along**2 / (came * meant) if came else 0.0,
        strength=along / meant,
        error=float(((kept - change) ** 2).sum() / meant) ** 0.5,
    )
