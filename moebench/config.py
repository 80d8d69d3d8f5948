"""The options of one cell: which system, machine, model and workload. Knows no files and no clocks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from moebench.budget import parse_budget, parse_bytes
from moebench.errors import UsageError


def option(default: Any, text: str) -> Any:
    """A dataclass field with a default and its help line."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class WorkloadConfig:
    """What is asked of the model: a synthetic routing trace, prompts, or a recorded trace."""

    kind: Literal["synthetic", "prompts", "trace"] = option("synthetic", "where routing comes from")
    name: str = option("synthetic", "name shown in the table and in the result's path")
    path: str = option("", "trace folder (kind=trace) or a JSON-lines file of prompts (kind=prompts)")
    seed: int = option(0, "seed of the synthetic trace or of the choice of prompts")
    requests: int = option(4, "requests in a run; a trace has its own")
    prompt_tokens: int = option(64, "tokens of each prompt")
    new_tokens: int = option(128, "tokens each request emits, at most: a model stops when its answer ends")
    batch: int = option(1, "sequences that decode together")

    def __post_init__(self) -> None:
        at_least("workload", self, requests=1, prompt_tokens=1, new_tokens=2, batch=1, seed=0)
        if self.kind == "trace" and not self.path:
            raise UsageError("workload kind=trace needs workload.path=FOLDER, a trace written by 'moebench trace'")
        if self.kind == "synthetic" and self.path:
            raise UsageError(
                "workload.path has no effect with kind=synthetic; choose workload=trace or workload=prompts"
            )


@dataclass(frozen=True)
class QualityConfig:
    """What answers are compared with the unmodified model's. ``quality=NAME`` is short for ``quality.suite=NAME``."""

    suite: str = option(
        "quick",
        "none, quick (8 items of each of tinymoe's tasks), local (all 100, on lm-eval), opencompass5, or names of "
        "lm-eval tasks, NAME[,NAME]",
    )
    limit: int = option(0, "items of each task, from the first on; 0 takes the suite's own")
    batch: int = option(20, "sequences that decode together")
    data_dir: str = option(
        "",
        "folder with data sets of your own, TASK.jsonl or TASK.parquet, instead of the hub's, and with further task "
        "files, TASK.yaml",
    )
    text: str = option(
        "", "held-out text for KL and perplexity: .jsonl with prompt and completion, or plain; empty: the tasks' own"
    )
    unsafe_code: bool = option(False, "run the programs that a model writes, in a process with limits")

    def __post_init__(self) -> None:
        at_least("quality", self, limit=0, batch=1)
        if not self.suite.replace(",", "").strip():
            raise UsageError("quality= is empty; say none, quick, local, opencompass5 or names of lm-eval tasks")
        on = [name for name in ("limit", "text", "data_dir", "unsafe_code") if getattr(self, name)]
        on += ["batch"] * (self.batch != 20)
        idle = on if self.suite == "none" else [n for n in on if n in ("data_dir", "unsafe_code")]
        if idle and self.suite in ("none", "quick", "local"):
            raise UsageError(f"quality.{idle[0]} has no effect with quality={self.suite}")


@dataclass(frozen=True)
class RunConfig:
    """One cell, fully resolved. ``knobs`` is an instance of the system's own config dataclass."""

    system: str = field(metadata={"help": "system to run; its own options are system.NAME=VALUE"})
    hw: str = field(metadata={"help": "hardware profile; host is this machine, written by 'moebench calibrate'"})
    knobs: Any = None
    model: str = option(
        "auto", "auto (tinymoe live and the profile's reference geometry), tinymoe, a geometry, a folder, or org/name"
    )
    workload: WorkloadConfig = field(default_factory=WorkloadConfig, metadata={"help": "what is asked of the model"})
    budget: str = option("0.25", "bytes for expert weights: a fraction of the routed experts, or a size such as 3GiB")
    device_budget: str = option(
        "auto",
        "part of the budget in the fastest tier, a fraction or a size; auto: what a device's own memory holds; "
        "with one memory it makes a second tier and copies between them",
    )
    memory: str | None = option(None, "cap on all memory that the run books, such as 6GiB")
    quant: Literal["int4", "int8", "none", "stored"] = option(
        "int4", "stored precision of expert weights; stored: as a quantised checkpoint has them"
    )
    layout: Literal["packed", "packed_gate_up", "packed_gate", "scattered", "checkpoint", "ordered"] = option(
        "packed",
        "how experts lie in the pack: whole; gate and up together, or gate alone, other matrices apart; each matrix "
        "apart (scattered, as GGUF); each tensor apart, scales too (checkpoint, as downloaded); whole, by order=",
    )
    codec: Literal["none", "rans"] = option("none", "how experts are stored: as they are, or entropy-coded (rANS)")
    order: str = option(
        "", "trace file whose most used experts come first; with layout=ordered only, where empty takes tinymoe's own"
    )
    stack: str = option("auto", "software stack whose constants the modeled clock uses; auto takes the profile's own")
    backend: Literal["torch", "mlx"] = option("torch", "tensor library that computes; each has packs of its own bytes")
    device: Literal["cpu", "cuda"] = option(
        "cpu", "what torch computes on in a measured run: the processor, or the CUDA device, with slots in its memory"
    )
    engine: str = option("auto", "read engine; auto takes the system's own, else the profile's")
    depth: int = option(
        0, "experts that a measured run reads at a time, as 'moebench doctor io' finds it; 0 takes the engine's own"
    )
    threads: int = option(0, "processor threads that compute in a measured run; 0: all cores but one, for the reads")
    numerics: Literal["row_invariant", "fast"] = option(
        "row_invariant", "kernels whose rows do not depend on their neighbours"
    )
    mode: Literal["auto", "measure", "model", "model_io"] = option(
        "auto",
        "clock: auto measures on a matching machine, models elsewhere; model_io models what a measured replay does, "
        "reads and the loop without compute",
    )
    scope: Literal["auto", "shared", "per_layer"] = option(
        "auto", "whether all layers share the cache slots; auto takes the system's own way"
    )
    quality: QualityConfig = field(
        default_factory=QualityConfig, metadata={"help": "what is asked beside the timed run; a word is its suite"}
    )
    repeats: int = option(1, "times the whole workload is measured")
    warmup_tokens: int = option(16, "decoded tokens before counting starts")
    chunk: int = option(0, "prompt tokens in one prefill pass; 0 takes the system's own way: 32, or the whole prompt")
    seed: int = option(0, "seed of the system's own random choices")
    out: str = option("results", "folder that result files go to")
    debug: bool = option(False, "show tracebacks")

    def __post_init__(self) -> None:
        if isinstance(self.quality, str):
            object.__setattr__(self, "quality", QualityConfig(self.quality))
        at_least("run", self, repeats=1, warmup_tokens=0, chunk=0, seed=0, depth=0, threads=0)
        parse_budget(self.budget, 1)
        if self.device_budget != "auto":
            parse_budget(self.device_budget, 1, "device_budget", "the budget")
        if self.order and self.layout != "ordered":
            raise UsageError("order=TRACE has an effect with layout=ordered only")
        if self.codec != "none" and self.layout not in ("packed", "ordered"):
            raise UsageError(f"codec={self.codec} codes whole experts: it needs layout=packed or ordered")
        if self.memory is not None:
            parse_bytes(self.memory, "memory")
        if self.warmup_tokens > self.workload.new_tokens - 2 and self.workload.kind != "trace":
            raise UsageError(
                f"warmup_tokens={self.warmup_tokens} leaves nothing to measure of"
                f" workload.new_tokens={self.workload.new_tokens}"
            )

    def resolved(self) -> dict[str, Any]:
        """Everything that was set, as plain data for a result file; ``out`` and ``debug`` change no result."""
        plain = dataclasses.asdict(self)
        knobs = plain.pop("knobs") or {}
        for name in ("out", "debug"):
            del plain[name]
        return {**plain, "system": {"id": self.system, **knobs}}


def at_least(where: str, config: Any, **bounds: int) -> None:
    """Refuse an option below its bound."""
    for name, bound in bounds.items():
        if getattr(config, name) < bound:
            raise UsageError(f"{where}: {name} must be at least {bound}, got {getattr(config, name)}")
