"""The run's hooks, bound once: a pluggy call costs microseconds, a bound callable a tenth of one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from operator import itemgetter
from time import perf_counter
from typing import Any

from moebench.errors import PluginError
from moebench.hookcheck import new_manager, register

FIRST_RESULT = (
    "route", "predicted", "prefetch", "cancel", "stage", "draft", "prune", "admit", "evict", "demote", "plan_reads",
    "place", "relayout", "order_compute",
)  # fmt: skip
BROADCAST = ("begin_request", "begin_step", "end_step", "acquired")
COUNTED = ("report",)  # broadcast too; each answer counts


class Hooks:
    """Callables of one run, positional in the order of their specification; None where nobody implements a decision.

    Each run has its own plugin manager with the chosen system and the observers, so two systems never compete. What
    the hooks of the ``measured`` plugin take is counted.
    """

    route: Callable[..., Any] | None
    predicted: Callable[..., Any] | None
    prefetch: Callable[..., Any] | None
    cancel: Callable[..., Any] | None
    stage: Callable[..., Any] | None
    draft: Callable[..., Any] | None
    prune: Callable[..., Any] | None
    admit: Callable[..., Any] | None
    evict: Callable[..., Any] | None
    demote: Callable[..., Any] | None
    plan_reads: Callable[..., Any] | None
    place: Callable[..., Any] | None
    relayout: Callable[..., Any] | None
    order_compute: Callable[..., Any] | None

    def __init__(self, plugins: list[object], measured: object = None) -> None:
        self._measured, self._watch = measured, Stopwatch()
        self.manager = new_manager()
        for plugin in plugins:
            register(self.manager, plugin)
        for name in FIRST_RESULT:
            setattr(self, name, self._decision(name))
        for name in BROADCAST:
            setattr(self, name, self._broadcast(name))

    @property
    def spent(self) -> tuple[float, int]:
        """Real seconds in the measured plugin's hooks so far, and calls of them."""
        return self._watch.seconds, self._watch.calls

    def report(self) -> dict[str, float]:
        """What the plugins counted, joined; anything but finite numbers by name is an error."""
        found: dict[str, float] = {}
        for counted in reversed(self.manager.hook.report()):
            if not isinstance(counted, Mapping) or not all(map(_is_number, counted.values())):
                raise PluginError(f"report returned {counted}: a finite number for each name")
            found |= {name: int(n) if isinstance(n, Integral) else float(n) for name, n in counted.items()}
        return found

    def _bound(self, name: str) -> list[Callable[..., Any]] | None:
        """Implementations in call order, adapted to the full argument list; None if a wrapper needs pluggy itself."""
        caller = getattr(self.manager.hook, name)
        arguments = caller.spec.argnames
        impls = caller.get_hookimpls()
        if any(i.wrapper or i.hookwrapper for i in impls):
            return None
        bound = [(impl, _adapt(impl.function, impl.argnames, arguments)) for impl in reversed(impls)]
        return [self._watch.over(call) if impl.plugin is self._measured else call for impl, call in bound]

    def _through_pluggy(self, name: str) -> Callable[..., Any]:
        caller = getattr(self.manager.hook, name)
        arguments = caller.spec.argnames

        def call(*args):
            return caller(**dict(zip(arguments, args, strict=True)))

        ours = any(impl.plugin is self._measured for impl in caller.get_hookimpls())
        return self._watch.over(call) if ours else call

    def _decision(self, name: str) -> Callable[..., Any] | None:
        bound = self._bound(name)
        if bound is None:
            return self._through_pluggy(name)
        if not bound:
            return None
        if len(bound) == 1:
            return bound[0]

        def first(*args):
            for call in bound:
                if (result := call(*args)) is not None:
                    return result
            return None

        return first

    def _broadcast(self, name: str) -> Callable[..., None]:
        bound = self._bound(name)
        if bound is None:
            return self._through_pluggy(name)
        if len(bound) == 1:
            return bound[0]

        def everyone(*args):
            for call in bound:
                call(*args)

        return everyone


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def _adapt(function: Callable[..., Any], wanted: tuple[str, ...], given: tuple[str, ...]) -> Callable[..., Any]:
    """Let an implementation that names fewer arguments be called with all of them."""
    if tuple(wanted) == tuple(given):
        return function
    indices = [given.index(w) for w in wanted]
    if len(indices) < 2:
        return lambda *args: function(*[args[i] for i in indices])
    pick = itemgetter(*indices)
    return lambda *args: function(*pick(args))


class Stopwatch:
    """Seconds in callables, and how often they were called."""

    __slots__ = ("calls", "seconds")

    def __init__(self) -> None:
        self.seconds, self.calls = 0.0, 0

    def over(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call`` with its time counted."""

        def counted(*args):
            started = perf_counter()
            result = call(*args)
            self.seconds += perf_counter() - started
            self.calls += 1
            return result

        return counted
