"""What BigMoMo's schedule across stages is worth for one layer of a verification window, on modeled phones.

    python benchmarks/bigmomo_schedule.py [HW ...]

One line per phone, geometry, share of experts at hand and order: ``loop`` is the order of a system that has none,
then arrival, wait_all and stages. A window is a draft of two levels with two branches and the token before it, seven
rows; its experts are 4.15 times one token's, between the 3.7 and 4.6 times that 3,545 real tokens of a model with 384
experts, six of them active, have in windows of six and eight rows. Which experts are at hand is drawn by a seed. In
milliseconds: the layer's experts from the first request to the last sum (makespan), what of it the accelerator does not
compute (exposed), what the loop waits for flash and mapping (stall). ``utilised`` is the share of the makespan in which
the accelerator computes, ``at most`` what no order exceeds, for copies into the chip, arithmetic and flash each take
their time one after another; ``groups`` are the calls.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np

from moebench import geometry as geometries
from moebench import hardware
from moebench.engine.acquire import Experts
from moebench.engine.hooks import Hooks
from moebench.geometry import Geometry
from moebench.harness.costs import StorageUse, build
from moebench.hookspecs import hookimpl
from moebench.plugins import load_plugins
from moebench.residency.tier import Tier
from moebench.step import VERIFY, Routing, Step
from moebench.systems.bigmomo.schedule import Schedule
from moebench.timeline.costs import Costs
from moebench.timeline.virtual import VirtualTimeline

PHONES = ("snapdragon_8_elite_gen5", "snapdragon_8_gen3")
MODELS = ("qwen3-30b-a3b", "lfm2-24b-a2b", "gemma-4-26b-a4b", "ernie-4.5-21b-a3b")
SHARES = (0.5, 0.8, 0.95, 1.0)
ORDERS = ("loop", "arrival", "wait_all", "stages")
ROWS, GROWTH = 7, 4.15
COLUMNS = ("model", "experts", "at hand", "order", "makespan", "exposed", "stall", "utilised", "at most", "groups")


class Only:
    """A system that keeps everything and schedules."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule

    @hookimpl
    def route(self, step, native):
        self.schedule.window(native.experts[step.valid])

    @hookimpl
    def order_compute(self, ready, pending, view):
        return self.schedule.next(ready, pending, view)


def window(shape: Geometry) -> np.ndarray:
    """Routing of seven rows, int [7, k], over as many distinct experts as such a window has; the first ones have most
    rows.
    """
    distinct = round(GROWTH * shape.top_k)
    more = np.arange(ROWS * shape.top_k - distinct) % shape.top_k
    return np.concatenate([np.arange(distinct), more]).reshape(ROWS, shape.top_k)


def layer(shape: Geometry, costs: Costs, order: str, share: float) -> tuple[float, float, int]:
    """Makespan and stall in seconds, and the calls, of one layer with ``share`` of its experts at hand."""
    schedule = Schedule("arrival" if order == "loop" else order, shape.experts)
    timeline = VirtualTimeline(costs)
    tier = Tier("device", shape.experts, shape.slot_bytes, shape.layers, shape.experts)
    experts = Experts(shape, [tier], timeline, Hooks([] if order == "loop" else [Only(schedule)]))
    ids = window(shape)
    count = len(np.unique(ids))
    at_hand = np.random.default_rng(0).permutation(count)[: round(share * count)]

    def serve(chosen: np.ndarray) -> float:
        rows = len(chosen)
        zeros = np.zeros(rows, np.int32)
        experts.begin(Step(0, VERIFY, zeros, zeros, np.ones(rows, bool)))
        _, found = experts.serve(0, None, Routing(chosen, None))
        since = timeline.now()
        for _ in found:
            pass
        return timeline.now() - since

    serve(at_hand[:, None])
    before = schedule.counted["groups"]
    took = serve(ids)
    return took, experts.record.stall_s, schedule.counted["groups"] - before


def lines(phone: str, model: str) -> Iterator[tuple]:
    """The table's rows of one geometry; layers are alike, so that one stands for all."""
    registry = load_plugins()
    shape = geometries.load(registry.model_path(model))
    costs = build(hardware.load(registry.hardware_path(phone)), shape, StorageUse((shape.slot_bytes,), "direct"))
    count = len(np.unique(window(shape)))
    copy_s, compute_s = VirtualTimeline(costs).stage_s(count, ROWS * shape.top_k)
    print(
        f"{model}: an expert takes {costs.read_s[-1] * 1e3:.3f} ms of flash, {costs.map_s * 1e3:.3f} to map,"
        f" {copy_s / count * 1e3:.4f} to copy in, {compute_s / count * 1e3:.4f} to compute, in {costs.chip_parts} parts"
    )
    for share in SHARES:
        missing = count - round(share * count)
        flash_s = missing * max(costs.read_s[-1], costs.map_s)
        for order in ORDERS:
            took, stall, groups = layer(shape, costs, order, share)
            most = compute_s / max(copy_s, compute_s, flash_s)
            yield (
                model, count, f"{share:.2f}", order, f"{took * 1e3:.3f}", f"{(took - compute_s) * 1e3:.3f}",
                f"{stall * 1e3:.3f}", f"{100 * compute_s / took:.1f} %", f"{100 * most:.1f} %", groups or "-",
            )  # fmt: skip


def main(phones: list[str]) -> None:
    """Print one table per phone."""
    for phone in phones or PHONES:
        print(f"\n{phone}")
        table = [line for model in MODELS for line in lines(phone, model)]
        for line in (COLUMNS, *table):
            print(f"{line[0]:20}" + "".join(f"{value!s:>10}" for value in line[1:]))


if __name__ == "__main__":
    main(sys.argv[1:])
