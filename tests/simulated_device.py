"""A device without a card: tensors that refuse to meet the host's, and streams that are threads and do work when a test
says so. What is in them is real, so that whole models run.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import ExitStack, contextmanager, nullcontext

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from moebench.backends.device import Event, Stream
from moebench.backends.torch_device import TorchDevice
from moebench.store import coded


class Unseen:
    """What torch asks a kind of device: none is here, so that nobody else in this process takes one."""

    is_initialized = is_available = _is_in_bad_fork = is_built = has_primary_context = lambda self, *_: False
    current_device = device_count = lambda self: 0
    manual_seed_all = lambda self, seed: None  # noqa: E731


class Hook(Unseen, torch._C._acc.PrivateUse1Hooks):
    """The same, asked from C++."""


_setup_privateuseone_for_python_backend("card", backend_module=Unseen(), hook=Hook())
CARD, HOST = torch.device("card:0"), torch.device("cpu")
CROSSING = ("copy_", "_to_copy")  # operations that may see tensors of both
NOW, LATE, RACE = "now", "late", "race"


class Card(torch.Tensor):
    """A tensor of device ``card``, whose numbers lie in ``real``."""

    @staticmethod
    def __new__(cls, real):
        layout = {"strides": real.stride(), "storage_offset": real.storage_offset(), "dtype": real.dtype}
        with torch.inference_mode(False):  # several views at once of an inference tensor cannot be wrapped
            card = torch.Tensor._make_wrapper_subclass(cls, real.size(), device=CARD, layout=real.layout, **layout)
        card.real_ = real
        return card

    __torch_function__ = torch._C._disabled_torch_function_impl

    def tolist(self):
        return self.real_.tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _call(func, args, kwargs or {})


class OnCard(TorchDispatchMode):
    """While it is entered, tensors can be made on ``card`` and brought there."""

    def __enter__(self):
        self.before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=card) makes it on the host, and it crosses
        return super().__enter__()

    def __exit__(self, *error):
        torch._C._set_only_lift_cpu_tensors(self.before)
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _call(func, args, kwargs or {})


def _call(func, args, kwargs):
    """Run an operation on the real numbers; tensors of host and card, numbers apart, may not meet."""
    name = func.overloadpacket.__name__
    if name in ("to", "type_as"):  # in inference mode they come whole; what they are made of says what crosses
        with OnCard():
            return func.decompose(*args, **kwargs)
    device = kwargs.get("device")
    tensors = [t for t in _flat((*args, *kwargs.values())) if isinstance(t, torch.Tensor)]
    cards = [t for t in tensors if isinstance(t, Card)]
    if cards and name not in CROSSING and any(t.dim() for t in tensors if not isinstance(t, Card)):
        raise RuntimeError(f"{name}: tensors of card and host meet")
    target = None if device is None else torch.device(device).type
    real = {key: _real(value) for key, value in kwargs.items()}
    if target not in (None, "meta"):
        real["device"] = HOST
    out = func(*map(_real, args), **real)
    if name.endswith("_") and not name.endswith("__"):
        return tensors[0]
    if target is None:
        return _carded(out) if cards else out
    crossed = out.clone() if name == "_to_copy" and (target == "card") != bool(cards) else out
    return Card(crossed) if target == "card" else crossed


def _flat(values):
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value


def _real(value):
    """The real numbers behind an argument."""
    if isinstance(value, list | tuple):
        return [_real(one) for one in value]
    return value.real_ if isinstance(value, Card) else value


def _carded(value):
    """A result as it lies on the card."""
    if isinstance(value, list | tuple):
        return type(value)(map(_carded, value))
    return Card(value) if isinstance(value, torch.Tensor) else value


@contextmanager
def on(device):
    """What a thread needs to compute with tensors of ``device``."""
    with ExitStack() as stack:
        stack.enter_context(OnCard() if device.at == CARD else nullcontext())
        stack.enter_context(torch.inference_mode())
        yield


class SimEvent(Event):
    """A point in a simulated stream; work before it that is late is done once it is wanted."""

    def __init__(self, stream):
        self.stream, self.done, self.wanted = stream, False, False

    def synchronize(self):
        changed = self.stream.device.changed
        with changed:
            self.wanted = True
            changed.notify_all()
            assert changed.wait_for(lambda: self.done or self.stream.error, timeout=60), "nothing came of waiting"
        if self.stream.error is not None:
            raise self.stream.error


class SimStream(Stream):
    """A thread that does work in order: at once (the issuer waits), some time later, or only when it is wanted."""

    def __init__(self, device, name):
        self.device, self.name, self.error, self.count = device, name, None, 0
        self.queue: deque = deque()
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def run(self, work):
        when = self.device.when(self.name, self.count)
        self.count += 1
        self._put((work, when))
        if when == NOW:
            self.record().synchronize()

    def wait(self, event):
        self._put((event, NOW))

    def record(self):
        event = SimEvent(self)
        self._put((event, NOW))
        return event

    def join(self):
        self.record().synchronize()

    def _put(self, item):
        with self.device.changed:
            self.queue.append(item)
            self.device.changed.notify_all()

    def _may_go(self):
        if self.device.closed:
            return True
        if not self.queue:
            return False
        what, when = self.queue[0]
        if when == LATE:
            return any(isinstance(e, SimEvent) and e.stream is self and e.wanted for e, _ in self.queue)
        return not isinstance(what, SimEvent) or what.stream is self or what.done or self._want(what)

    def _want(self, event):
        if not event.wanted:
            event.wanted = True
            self.device.changed.notify_all()
        return event.done

    def _serve(self):
        changed = self.device.changed
        while True:
            with changed:
                changed.wait_for(self._may_go)
                if self.device.closed:
                    return
                what, when = self.queue[0]
            if not isinstance(what, SimEvent):
                if when == RACE:
                    time.sleep(self.device.rng.random() * 1e-3)
                try:
                    with on(self.device):
                        what()
                except BaseException as error:
                    self.error = error
            with changed:
                self.queue.popleft()
                if isinstance(what, SimEvent) and what.stream is self:
                    what.done = True
                changed.notify_all()


class SimDevice(TorchDevice):
    """``when(stream name, number of its work)`` says NOW, LATE or RACE of each piece of work."""

    def __init__(self, when=lambda stream, index: RACE, at=CARD, seed=0):
        self.at, self.when, self.rng = at, when, np.random.default_rng(seed)
        self.changed, self.closed, self.pinned = threading.Condition(), False, []
        self.up, self.down, self.compute = (SimStream(self, name) for name in ("up", "down", "compute"))

    def allocate(self, count, nbytes):
        return super().allocate(count, nbytes).fill_(0xFF)  # poison: bytes nobody loaded are NaN

    def free_bytes(self):
        return 1 << 30

    def decode(self, stored, target, decoded):
        """By the compiled decoder, which takes no step after another in Python."""
        coded.decode(stored, decoded)
        self.upload(decoded.copy(), target)

    def pin(self, array):
        assert array.ctypes.data % 4096 == 0
        self.pinned.append(array.ctypes.data)

    def unpin(self, array):
        self.pinned.remove(array.ctypes.data)

    def close(self):
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        for stream in (self.up, self.down, self.compute):
            stream.thread.join(timeout=10)


def scheduled(choices):
    """A policy by drawn choices, over and over: each piece of work of any stream takes the next one."""
    at = iter(range(10**9))
    return lambda stream, index: choices[next(at) % len(choices)]
