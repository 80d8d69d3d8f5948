"""How a measurement is written down: value, unit, method, spread and day; and what could not be taken, with its reason.

Knows the form of a hardware profile; measures nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from moebench.curves import CURVES, RATE, TIME
from moebench.errors import MoebenchError
from moebench.probes.samples import Samples
from moebench.store.engines import StoreError

REFUSALS = (MoebenchError, StoreError, OSError, RuntimeError, ImportError)


class Record:
    """Entries of one calibration. ``done(share, what)`` is called as parts begin and end; ``seconds`` are what it may
    take, of which every part gets its share.
    """

    def __init__(self, date: str, seconds: float, done: Callable[[float, str], None]) -> None:
        self.date, self.seconds, self._done = date, seconds, done
        self.curves: dict[str, dict[str, Any]] = {}
        self.unmeasured: dict[str, str] = {}

    @contextmanager
    def part(self, what: str, share: float, needed: bool = False) -> Iterator[float]:
        """A part that may take ``share`` of the time; yields its seconds. What refuses it is written down; of a part
        that every profile needs it is an error of one line.
        """
        self._done(0.0, what)
        try:
            yield share * self.seconds
        except REFUSALS as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            if needed:
                raise MoebenchError(f"calibrate: {what} cannot be measured: {reason}") from error
            self.unmeasured[what] = reason
        self._done(share, what)

    def number(self, samples: Samples, unit: str, method: str, kind: str = "measured") -> dict[str, Any]:
        """The entry of one number."""
        spread = samples.spread
        return {
            "value": _short(samples.value),
            "unit": unit,
            "source": f"{kind}: {method}",
            "spread": {"low": _short(spread.low), "high": _short(spread.high), "n": spread.n},
            "date": self.date,
        }

    def fact(self, value: float, unit: str, method: str) -> dict[str, Any]:
        """The entry of a number that the system states."""
        return self.number(Samples((value,)), unit, method)

    def table(
        self, found: Mapping[tuple[int, int], Samples], method: str, axes: tuple[str, str], unit: str, scale: float = 1
    ) -> dict[str, Any]:
        """The entry of a curve from samples by point; ``scale`` is the unit of the first axis."""
        xs, ys = (sorted({point[i] for point in found}) for i in (0, 1))
        of = {"rows": lambda s: s.value, "low": lambda s: s.spread.low, "high": lambda s: s.spread.high}
        tables = {name: [[_short(value(found[x, y])) for y in ys] for x in xs] for name, value in of.items()}
        return {
            "unit": unit,
            "source": f"measured: {method}",
            "date": self.date,
            axes[0]: [_short(x / scale) for x in xs],
            axes[1]: ys,
            **tables,
            "n": min(len(samples.values) for samples in found.values()),
        }

    def curve(self, name: str, found: Mapping[tuple[int, int], Samples], method: str, scale: float = 1) -> None:
        """Keep a curve under its name."""
        unit, *axes, _ = CURVES[name]
        assert unit in (RATE, TIME)
        self.curves[name] = self.table(found, method, (axes[0], axes[1]), unit, scale)


def _short(value: float) -> float:
    """Five digits."""
    return float(f"{value:.5g}")
