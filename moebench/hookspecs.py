"""Every hook of moebench: decorator, signature, one line. ``docs/hooks.md`` says more about each argument."""

from __future__ import annotations

import pluggy

hookspec = pluggy.HookspecMarker("moebench")
hookimpl = pluggy.HookimplMarker("moebench")

# --- registry: broadcast, called once at start ---------------------------------------------------------------------


@hookspec
def register_systems(register):
    """Register ``SystemSpec`` objects: ``register(spec)``."""


@hookspec
def register_hardware(register):
    """Register hardware profiles: ``register(path_to_yaml)``."""


@hookspec
def register_models(register):
    """Register model geometries: ``register(path_to_yaml)``."""


@hookspec
def register_io(register):
    """Register read engines: ``register(name, factory)``; ``factory(pack, **options)`` returns a ``ReadEngine``."""


# --- lifecycle: broadcast ------------------------------------------------------------------------------------------


@hookspec
def begin_request(sequences, view):
    """A batch of new requests starts; reset whatever belongs to one request."""


@hookspec
def begin_step(step, view):
    """A forward pass is about to start."""


@hookspec
def end_step(step, record, view):
    """A forward pass ended; ``record`` is its ``StepRecord`` (observers: metrics, tracing, progress)."""


@hookspec
def report():
    """A run ended: return what the system counted, name -> number, for the result file."""


# --- routing, prefetch: first result -------------------------------------------------------------------------------


@hookspec(firstresult=True)
def route(step, layer, hidden, native, view):
    """Return the ``Routing`` to execute instead of ``native``, or None to keep it."""


@hookspec(firstresult=True)
def predicted(step):
    """While a trace is recorded, after a pass: return what was predicted for it, channel name -> int [N, L, k]."""


@hookspec(firstresult=True)
def prefetch(step, point, view):
    """Return expert keys to read ahead at ``point`` ("begin", a layer index, or "end"), most urgent first, or None."""


@hookspec(firstresult=True)
def cancel(step, layer, view):
    """The layer's demand is known: return keys whose reads ahead are stale; those that have not begun are dropped."""


@hookspec(firstresult=True)
def stage(step, view):
    """After a step, return expert keys to load one after another before anything else runs, or None."""


# --- speculation: first result -------------------------------------------------------------------------------------


@hookspec(firstresult=True)
def draft(sequence, tokens, view):
    """Before a pass, guess what follows ``tokens`` (int64, all ids of the sequence so far): a ``Draft``, or None."""


@hookspec(firstresult=True)
def prune(draft, view):
    """Return a bool per node of ``draft``: verify it (a kept node keeps its parent); None verifies all."""


# --- cache ---------------------------------------------------------------------------------------------------------


@hookspec
def acquired(step, layer, keys, ready, view):
    """The layer demanded ``keys``; ``ready[i]`` says whether key ``i`` was resident and complete (broadcast)."""


@hookspec(firstresult=True)
def admit(keys, view):
    """Return a bool per missing key: keep it after use (True) or use a temporary slot (False); None keeps all."""


@hookspec(firstresult=True)
def evict(tier, need, candidates, view):
    """Return at least ``need`` of the ``candidates`` (keys) to leave ``tier``, worst first."""


@hookspec(firstresult=True)
def demote(keys, view):
    """Return a bool per key leaving the device tier: copy to the host tier (True) or drop (False); None demotes all."""


# --- I/O -----------------------------------------------------------------------------------------------------------


@hookspec(firstresult=True)
def plan_reads(keys, view):
    """Return the missing ``keys`` of one wave in the order of their reads; a group of neighbours is one request."""


@hookspec(firstresult=True)
def place(step, layer, keys, view):
    """Return a bool per key of a wave: compute it on the host's processor (True) or on the device; None: all there."""


@hookspec(firstresult=True)
def relayout(step, view):
    """After a step, return two experts (keys) of one layer that are to change places on storage, or None."""


@hookspec(firstresult=True)
def order_compute(ready, pending, view):
    """Return the next key to compute, chosen from ``ready`` keys, or from ``pending`` to wait for that one."""
