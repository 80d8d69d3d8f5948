"""Where the time of a run goes: an observer of the timed window, and the block of a row that a report draws from it.

Knows steps, the clock's parts and its log; no metric's formula and no picture. Only while it records the log of a few
steps does a run do anything for an event.
"""

from __future__ import annotations

from array import array
from typing import Any

from moebench.engine.hooks import Hooks
from moebench.geometry import Geometry
from moebench.hookspecs import hookimpl
from moebench.metrics import Metrics
from moebench.step import PREFILL
from moebench.timeline.base import COMPUTE, LANES, LINK, OVERHEAD, PARTS, STORAGE, UNIT, Event, Timeline

STEPS = 3  # consecutive ones on the timeline
MOST_EVENTS = 600
OF_AN_EXPERT = ("read", "page cache", "up", "down", "decode", "map", "storage", "link", "decoder", "expert")
SOFTWARE = ("floor", "sync", "issue", "system", "loop")
OF_A_LAYER = ("dense", "routing", "experts", *SOFTWARE)
Named = tuple[int, str, float, float]  # lane, label, start, duration


class Anatomy:
    """Parts of the time of decode steps; ``metrics``, called before, says which are timed."""

    def __init__(self, metrics: Metrics, timeline: Timeline) -> None:
        self.metrics, self.timeline = metrics, timeline
        self.hooks: Hooks | None = None
        self.tokens, self.misses, self.stall_s = array("q"), array("q"), array("d")
        self.spent = [0.0] * len(PARTS)
        self.hook_s, self.hook_calls = 0.0, 0
        self.log: list[Event] = []
        self.log_steps: list[tuple[float, float]] = []
        self._mark()

    def _mark(self) -> None:
        """What comes from here on belongs to the next step."""
        self._spent = self.timeline.spent[:]
        self._hooked = self.hooks.spent if self.hooks is not None else (0.0, 0)

    @hookimpl
    def begin_request(self, sequences, view) -> None:
        """Time between requests is nobody's, and no timeline goes across it."""
        self._mark()
        self._close_log()

    @hookimpl
    def end_step(self, step, record, view) -> None:
        """Take the parts of a timed step, and its log where it is one of the first."""
        if step.phase != PREFILL and self.metrics.steps > len(self.tokens):
            self.tokens.append(step.emits)
            self.misses.append(record.misses)
            self.stall_s.append(record.stall_s)
            for part, seconds in enumerate(self.timeline.spent):
                self.spent[part] += seconds - self._spent[part]
            seconds, calls = self.hooks.spent
            self.hook_s += seconds - self._hooked[0]
            self.hook_calls += calls - self._hooked[1]
            if self.timeline.log is not None:
                self.log_steps.append((record.started_s, record.duration_s))
        self._mark()
        if self.timeline.log is not None and (step.phase == PREFILL or len(self.log_steps) == STEPS):
            self._close_log()
        if not self.log_steps and self.metrics.seen >= self.metrics.warmup_tokens:
            self.timeline.log = []

    def _close_log(self) -> None:
        if self.log_steps and self.timeline.log is not None:
            self.log = self.timeline.log
        self.timeline.log = None

    def details(self, geometry: Geometry, computes: bool) -> dict[str, Any]:
        """The block ``details`` of a row; empty where no step was timed. Numbers have 6 significant digits, times of
        the timeline whole tenths of a microsecond. Where nothing ``computes``, that part is the driver's: overhead.
        """
        if not self.tokens:
            return {}
        self._close_log()
        spent, window, emitted = list(self.spent), sum(self.metrics.step_s), sum(self.tokens)
        if self.timeline.clock == "wall":  # it knows what was waited for and computed; what else happened is the rest
            if not computes:
                spent[COMPUTE] = 0.0
            spent[OVERHEAD] = window - sum(spent[:OVERHEAD])
        return {
            "steps": {
                "ms": [_short(s * 1e3) for s in self.metrics.step_s],
                "tokens": self.tokens.tolist(),
                "misses": self.misses.tolist(),
                "stall_ms": [_short(s * 1e3) for s in self.stall_s],
            },
            "split_ms_per_token": {part: _short(s / emitted * 1e3) for part, s in zip(PARTS, spent, strict=True)},
            "timeline": _timeline(self.log, self.log_steps, geometry),
        }

    def hook_cost(self) -> dict[str, float]:
        """Real time in the system's hooks and calls of them, per token emitted in timed steps."""
        emitted = sum(self.tokens)
        if not emitted:
            return {}
        return {
            "hook_us_per_token": _short(self.hook_s / emitted * 1e6),
            "hook_calls_per_token": _short(self.hook_calls / emitted),
        }


def _short(value: float) -> float:
    """6 significant digits."""
    return float(f"{value:.6g}")


def _timeline(log: list[Event], steps: list[tuple[float, float]], geometry: Geometry) -> dict[str, Any]:
    """Lanes, events and steps in microseconds from the first step's start. Where there are too many, events of a
    layer become one, and if that does not do, the last steps are left out.
    """
    if not steps:
        return {}
    events = _named(sorted(log, key=lambda event: (event[3], event[4], event[0])), steps[0][0], geometry)
    if len(events) > MOST_EVENTS:
        events = _joined(events)
    while len(events) > MOST_EVENTS and len(steps) > 1:
        steps = steps[:-1]
        events = [event for event in events if event[2] < sum(steps[-1]) - steps[0][0]]
    origin, end = steps[0][0], sum(steps[-1])
    return {
        "lanes": list(LANES),
        "events": [
            [lane, label, _us(start), _us(min(start + took, end - origin) - start)]
            for lane, label, start, took in events
            if _us(min(start + took, end - origin) - start) > 0
        ],
        "steps": [[_us(begin - origin), _us(took)] for begin, took in steps],
    }


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def _named(log: list[Event], origin: float, geometry: Geometry) -> list[Named]:
    """Events as (lane, label, start, duration), in seconds from ``origin``. Layers are counted as they compute; of
    transfers that overlap each begins where the one before it ended.
    """
    named, layer, ended = [], -1, {STORAGE: origin, LINK: origin}
    for lane, what, of, begin, end in log:
        if lane == UNIT and what == "dense":
            layer = (layer + 1) % geometry.layers
        if what in OF_AN_EXPERT or what.startswith("run of"):
            label = f"{what} L{of // geometry.experts} E{of % geometry.experts}"
        elif what in OF_A_LAYER:
            label = f"{what} L{max(layer, 0)}" + (f" x{of}" if of > 1 and what in ("experts", "issue") else "")
        else:
            label = what
        start = max(begin, ended.get(lane, origin))
        if end > start:
            named.append((lane, label, start - origin, end - start))
        if lane in ended:
            ended[lane] = max(end, start)
    return named


def _joined(events: list[Named]) -> list[Named]:
    """What a lane does of one kind for one layer in a row, as one event of its summed length where the first began."""
    joined: list[Named] = []
    last: dict[int, tuple[int, str]] = {}
    for lane, label, start, took in events:
        what, _, layer = label.partition(" E")[0].partition(" x")[0].rpartition(" ")
        kind = f"{'software' if what in SOFTWARE else what} {layer}"
        at, before = last.get(lane, (0, ""))
        if before == kind:
            _, _, begin, so_far = joined[at]
            joined[at] = (lane, kind, begin, so_far + took)
        else:
            last[lane] = (len(joined), kind)
            joined.append((lane, label, start, took))
    return joined
