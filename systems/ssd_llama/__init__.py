"""SSD-LLaMA: whole experts read past the page cache into a small pinned pool, kept in device and host memory by use.

``score.py`` says who is worth a slot, ``placement.py`` where the active experts run, ``published.py`` what the paper
measured. Nothing is predicted; native routing runs. See README.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np

from moebench.errors import UsageError
from moebench.hookspecs import hookimpl
from moebench.residency.policies import make_policy
from moebench.step import DECODE, Step
from moebench.systems.ssd_llama.placement import Placement
from moebench.systems.ssd_llama.published import PUBLISHED
from moebench.systems.ssd_llama.score import Admission, make_score
from moebench.systemspec import Handling, RunContext, SystemSpec

PAPER = "arXiv 2609.18110, SSD-LLaMA"
MATRICES = 3  # gate, up and down
LASTING = {"expert": MATRICES, "gate_up": 2, "gate": 1, "none": 0}  # matrices of an expert that slots may keep


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class SsdLlamaConfig:
    """Options of ssd_llama."""

    score: Literal["frequency_recency", "frequency", "recency"] = _option(
        "frequency_recency", "who stays on the device: uses halved for each half_life idle, uses alone, last use alone"
    )
    half_life: float = _option(32.0, "tokens without a use after which an expert's uses count half")
    temporary: int = _option(
        16, "device slots for experts that have not earned one; 0: every expert gets a lasting one"
    )
    promote_after: int = _option(2, "uses an expert must have to push out another")
    tiers: Literal["three", "two"] = _option("three", "device, host and storage; two: the host keeps nothing")
    granularity: Literal["expert", "gate_up", "gate", "none"] = _option(
        "expert", "what of an expert slots keep; gate and gate_up are for replays"
    )
    pool: int = _option(6, "pinned buffers: transfers to the device at a time; 0: no bound")
    placement: str = _option("device", "where active experts run: device, auto, or how many of each layer on the host")

    def __post_init__(self) -> None:
        if self.placement not in ("device", "auto") and not self.placement.isdecimal():
            raise UsageError(
                f"system.placement={self.placement} is not one of device, auto, or a number of experts from 1 up"
            )
        if self.placement.isdecimal() and int(self.placement) == 0:
            raise UsageError("system.placement=0 is placement=device")
        for name, least in (("temporary", 0), ("promote_after", 1), ("pool", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"system.{name} must be at least {least}, got {getattr(self, name)}")
        if not 0.01 <= self.half_life <= 1e6:
            raise UsageError(f"system.half_life must lie between 0.01 and 1e6 tokens, got {self.half_life}")
        if self.score != "frequency_recency":
            self._idle("half_life", "system.score=frequency_recency")
        if not self.temporary:
            self._idle("promote_after", "system.temporary above 0")
        if self.granularity == "none":
            for name in ("score", "half_life", "promote_after"):
                self._idle(name, "a granularity that keeps something")

    def _idle(self, name: str, where: str) -> None:
        """Refuse an option that was set and changes nothing."""
        default = next(f.default for f in fields(self) if f.name == name)
        if getattr(self, name) != default:
            raise UsageError(f"system.{name} has an effect with {where} only")

    @property
    def units(self) -> int:
        """Cache units of one expert: its matrices where slots hold single ones."""
        return MATRICES if self.granularity in ("gate", "gate_up") else 1


def handling(config: SsdLlamaConfig) -> Handling:
    """How the loop moves experts."""
    return Handling(
        pool=config.pool * config.units,
        wave=config.temporary * config.units,
        whole_reads=True,
        host_cache=config.tiers == "three",
        on_host=config.placement != "device",
        matrices=config.units > 1,
    )


class SsdLlama:
    """The hooks of one run."""

    def __init__(self, config: SsdLlamaConfig, run: RunContext) -> None:
        shape = run.geometry
        if run.scope != "shared":
            raise UsageError("ssd_llama's tiers are shared by all layers: scope=shared or scope=auto")
        self.config, self.units = config, config.units
        active = shape.top_k // config.units
        if config.placement.isdecimal() and int(config.placement) > active:
            raise UsageError(f"system.placement={config.placement}: {shape.name} has {active} active experts a layer")
        self.policy = make_score(config.score, shape.keys, run.slots, shape.layers, config.half_life)
        self.below = make_policy("lru", shape.keys, run.slots, shape.layers)  # of the host tier
        lasting = np.arange(shape.keys) % self.units < LASTING[config.granularity]
        spare = config.temporary * config.units
        self.admission = Admission(self.policy, run.slots, spare, config.promote_after, lasting)
        self.placement = Placement(config.placement, active, self.units)
        self.on_host: set[int] = set()
        self.counted = dict.fromkeys(("kept", "temporary", "on_host"), 0)
        if self.units == 1:
            self.plan_reads = None  # whole experts are one request each

    @hookimpl
    def acquired(self, step: Step, keys: list[int], ready: list[bool], view: Any) -> None:
        """A demand: uses are counted, and which of its experts run on the host is settled."""
        self.policy.access(keys, ready)
        if len(view.tiers) > 1:
            self.below.access(keys, ready)
        self.admission.used(keys)
        self.on_host = self.placement.host_share(keys) if step.phase == DECODE else set()

    @hookimpl
    def admit(self, keys: list[int]) -> list[bool]:
        """Cold experts get temporary slots; without any, all that may stay do."""
        keep = self.admission.earned(keys) if self.config.temporary else self.admission.lasting[keys].tolist()
        kept = sum(keep)
        self.counted["kept"] += kept
        self.counted["temporary"] += len(keep) - kept
        return keep

    @hookimpl
    def evict(self, tier: str, need: int, candidates: np.ndarray, view: Any) -> np.ndarray:
        """The lowest score leaves the device, the least recently used the host."""
        if tier != view.tiers[0]:
            return self.below.victims(candidates, need)
        victims = self.policy.victims(candidates, need)
        self.admission.left(victims.tolist())
        return victims

    @hookimpl
    def plan_reads(self, keys: list[int], view: Any) -> list[tuple[int, ...]]:
        """Missing matrices of one expert that lie side by side are one request."""
        missing = np.asarray(keys, np.int64)
        apart = (np.diff(view.position(missing)) != 1) | (np.diff(missing // self.units) != 0)
        return [tuple(run.tolist()) for run in np.split(missing, np.flatnonzero(apart) + 1)]

    @hookimpl
    def place(self, keys: list[int]) -> list[bool] | None:
        """The host's share of this layer's demand."""
        if not self.on_host:
            return None
        self.counted["on_host"] += len(self.on_host.intersection(keys))
        return [key in self.on_host for key in keys]

    @hookimpl
    def end_step(self, step: Step, record: Any) -> None:
        """The time of a decoded token is what splits are judged by."""
        if step.phase == DECODE:
            self.placement.observe(record.duration_s, record.read_bytes)

    @hookimpl
    def report(self) -> dict[str, float]:
        """Counts of the whole run: missing experts kept and passed through, experts run on the host, the split held."""
        return {**self.counted, "host_split": self.placement.count, "splits_tried": self.placement.trials}


@hookimpl
def register_systems(register):
    """Register ssd_llama."""
    register(
        SystemSpec(
            id="ssd_llama",
            title="SSD-LLaMA",
            summary="whole experts read directly; three tiers by use, cold experts in temporary slots; no prediction",
            make=SsdLlama,
            paper=PAPER,
            config=SsdLlamaConfig,
            handling=handling,
            whole_prompt=True,
            published=PUBLISHED,
        )
    )
