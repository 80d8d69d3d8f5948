"""What hooks cost: live decode of tinymoe with every expert resident, without a plugin and with one of every hook.

    python benchmarks/hook_overhead.py [--tokens N] [--rounds N]

The plugin returns None from every hook, so that what is left is the loop's own price of asking: calls, views, arrays.
Arms alternate round by round and processor time counts, so that a busy machine slows all alike; medians are printed
with the share that hooks take of a step. "timed" is the plugin with its hooks measured, as in every run. The last
line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from decode_overhead import PROMPT, tiny_model

from moebench.backends.torch_bytes import TorchCpuLayout
from moebench.backends.torch_model import TorchBackend
from moebench.backends.torch_source import TransformersSource
from moebench.engine.acquire import Experts
from moebench.engine.hooks import BROADCAST, FIRST_RESULT, Hooks
from moebench.engine.loop import Loop
from moebench.geometry import Geometry
from moebench.hookspecs import hookimpl
from moebench.metrics import Metrics
from moebench.residency.tier import Tier
from moebench.store.engines import open_engine
from moebench.store.layout import QuantSpec
from moebench.store.pages import aligned_buffer
from moebench.store.writer import write_pack
from moebench.timeline.wall import WallTimeline

TINYMOE = Geometry("tinymoe", layers=8, experts=32, top_k=4, hidden=128, intermediate=64, other_parameters=0)


def silent_plugin() -> object:
    """An object that implements every hook, with all its arguments, and says nothing."""
    from moebench import hookspecs

    methods = {}
    for name in (*FIRST_RESULT, *BROADCAST):
        arguments = getattr(hookspecs, name).__code__.co_varnames[: getattr(hookspecs, name).__code__.co_argcount]
        namespace: dict = {}
        exec(f"def {name}(self, {', '.join(arguments)}): return None", namespace)
        methods[name] = hookimpl(namespace[name])
    return type("Silent", (), methods)()


def resident_experts(pack, plugins: list[object], measured: object = None) -> Experts:
    """A loop on a measured clock in which every read is over."""
    arena = aligned_buffer(TINYMOE.keys * pack.slot_bytes).reshape(TINYMOE.keys, pack.slot_bytes)
    tier = Tier("device", TINYMOE.keys, pack.slot_bytes, TINYMOE.layers, TINYMOE.experts, "shared", arena)
    timeline = WallTimeline(open_engine("pread", pack), lambda name, slot: arena[slot])
    metrics = Metrics(0, lambda: (timeline.storage_bytes, timeline.storage_requests))
    experts = Experts(TINYMOE, [tier], timeline, Hooks([*plugins, metrics], measured))
    experts.preload()
    return experts


def decode(backend: TorchBackend, experts: Experts, tokens: int) -> float:
    """Milliseconds of processor time per token."""
    loop = Loop(backend, experts, 64)
    times = []
    for count in (1, tokens + 1):
        started = time.process_time()
        loop.generate(PROMPT.tolist(), count)
        times.append(time.process_time() - started)
    return (times[1] - times[0]) / tokens * 1e3


def main() -> None:
    """Run all arms and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        pack = write_pack(Path(folder) / "pack", TransformersSource(tiny_model()), QuantSpec("int4"), TorchCpuLayout())
        backend = TorchBackend(pack, pack.dense_path, pack.manifest.model["config"])
        silent = silent_plugin()
        arms = {
            "no plugin": resident_experts(pack, []),
            "every hook": resident_experts(pack, [silent]),
            "every hook, timed": resident_experts(pack, [silent], silent),
        }
        samples: dict[str, list[float]] = {name: [] for name in arms}
        for experts in arms.values():
            decode(backend, experts, 4)
        for turn in range(arguments.rounds):
            order = list(arms.items())
            for name, experts in order[turn % 3 :] + order[: turn % 3]:
                samples[name].append(decode(backend, experts, arguments.tokens))
        seconds, calls = arms["every hook, timed"].hooks.spent
        for experts in arms.values():
            experts.timeline.close()
    bare = samples["no plugin"]
    found = {name: statistics.median(values) for name, values in samples.items()}
    share = {
        name: statistics.median((value - base) / base for value, base in zip(values, bare, strict=True))
        for name, values in samples.items()
    }
    print(f"{'arm':20s} {'ms/token':>9s} {'over no plugin':>15s}")
    for name, value in found.items():
        print(f"{name:20s} {value:9.3f} {share[name]:14.2%}")
    print(f"inside the hooks: {seconds / calls * 1e6:.2f} us a call")
    print(json.dumps({"ms_per_token": found, "share": share, "calls": calls, "rounds": arguments.rounds}))


if __name__ == "__main__":
    main()
