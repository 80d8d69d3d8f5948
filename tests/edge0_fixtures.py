"""Edge0 built by hand around random heads: on a tiny model that computes, and on small traces."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from engine_fixtures import GEOMETRY

from moebench.hookspecs import hookimpl
from moebench.routing import RoutingLaw
from moebench.systems.edge0 import Edge0, Edge0Config
from moebench.systems.edge0.equipment import Content
from moebench.systems.edge0.heads import PARTS, Plan, head_shapes
from moebench.systems.edge0.predictor import Heads, Recorded
from moebench.systems.edge0.student import Head
from moebench.systems.edge0.surrogate import predicted
from moebench.systemspec import Equipment, RunContext

LAW = RoutingLaw("softmax_topk", renormalise=True)


def random_heads(plan: Plan, hidden: int, experts: int, seed: int = 0) -> dict[int, dict[str, np.ndarray]]:
    """Heads whose three parts all matter, fp16."""
    rng = np.random.default_rng(seed)
    return {
        owner: {
            part: (rng.standard_normal(shape) * (3.0 / shape[1] ** 0.5)).astype(np.float16)
            for part, shape in head_shapes(hidden, experts).items()
        }
        for owner in plan.owners
    }


def untrained(router: np.ndarray) -> dict[str, np.ndarray]:
    """A head as training begins, over the next layer's router [E, H]."""
    head = Head(torch.from_numpy(router))
    return {part: getattr(head, part).detach().numpy() for part in PARTS}


class Logged(Edge0):
    """Edge0 that writes down what every layer executed, what owners saw, and what was booked, in order."""

    def __init__(self, config: Edge0Config, run: RunContext) -> None:
        super().__init__(config, run)
        self.executed, self.seen, self.log = [], [], []
        book = self.staging.book

        def logged(layer, keys):
            self.log.append(("book", layer, tuple(keys)))
            return book(layer, keys)

        self.staging.book = logged

    @hookimpl
    def begin_request(self, sequences):
        super().begin_request(sequences)
        self.log.append(("request",))

    @hookimpl
    def begin_step(self, step):
        super().begin_step(step)
        self.log.append(("step", step.index, step.phase))
        self.staging.check_integrity()

    @hookimpl
    def route(self, step, layer, hidden, native, view):
        routing = super().route(step, layer, hidden, native)
        self.log.append(("route", layer, step.index))
        ids = np.array(routing.experts)
        self.executed.append((step.index, step.phase, layer, ids, bool(routing.ahead)))
        if hidden is not None:
            self.seen.append((step, layer, hidden.float().numpy().copy(), ids, np.array(native.experts)))
        return routing


def live(config: Edge0Config, geometry, plan: Plan, heads, ops, slots: int, scope="shared", batch=1, cls=Logged):
    """The plugin of a live run with these heads."""

    def predictor(with_ops):
        first = plan.first_token if config.first_token == "auto" else config.first_token
        return Heads(plan, heads, geometry.experts, LAW, with_ops, first)

    content = Content(LAW, plan if config.prerouter else None, 1000, predictor)
    equipment = Equipment(top_k=plan.top_k, content=content)
    run = RunContext(replace(geometry, top_k=plan.top_k), slots, scope, batch=batch, ops=ops, equipment=equipment)
    return cls(config, run)


def replayed(
    config: Edge0Config, trace, plan: Plan, slots: int, scope="shared", batch=1, geometry=GEOMETRY, cls=Logged
):
    """The plugin of a replay of ``trace`` with a surrogate's predictions; returns (plugin, channel)."""
    channel = predicted(trace, plan.top_k, plan.consumers, 0.6, seed=3)
    first = plan.first_token if config.first_token == "auto" else config.first_token
    content = Content(None, plan if config.prerouter else None, 1000, lambda ops: Recorded(trace, channel, first))
    run = RunContext(
        replace(geometry, top_k=plan.top_k), slots, scope, batch=batch,
        equipment=Equipment(top_k=plan.top_k, content=content),
    )  # fmt: skip
    return cls(config, run), channel
