"""Run one cell and make its row. Live cells decode shipped or given prompts, replay cells follow a routing trace."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from moebench.config import RunConfig
from moebench.engine.loop import Loop, replay
from moebench.errors import UsageError
from moebench.harness import environment, figures
from moebench.harness.assets import LiveModel, folder_geometry, load_live, read_prompts, text_hash, with_drafter
from moebench.harness.backend import open_backend
from moebench.harness.costs import coded_bytes
from moebench.harness.frame import require_budget
from moebench.harness.matrices import by_matrix
from moebench.harness.passes import Sessions
from moebench.harness.plan import Cell
from moebench.harness.quality import Asked, ask, suite_for, unasked
from moebench.harness.rows import run_row
from moebench.harness.session import Session, open_session
from moebench.plugins import Registry
from moebench.result import Row
from moebench.step import PREFILL
from moebench.systemspec import Equipment, Target
from moebench.trace.drafts import has_drafts
from moebench.trace.format import Trace

Progress = Callable[[str], None]


def run_cell(cell: Cell, registry: Registry, progress: Progress = lambda text: None) -> Row:
    """Run a cell from nothing to its row; raises what a user can mend."""
    started = time.perf_counter()
    row = _live(cell, registry, progress) if cell.live else _replay(cell, registry, progress)
    volatile = {
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(time.perf_counter() - started, 3),
    }
    return replace(row, volatile={**row.volatile, **volatile})


# --- replay --------------------------------------------------------------------------------------------------------


def load_trace(cell: Cell) -> Trace:
    """The routing that a replay cell follows."""
    from moebench.trace import format as trace_format
    from moebench.trace.fits import synthetic

    workload, geometry = cell.config.workload, cell.geometry
    if workload.kind == "trace":
        trace = trace_format.load(workload.path)
        if trace.layers != geometry.layers or trace.expert_count != geometry.experts:
            raise UsageError(
                f"trace {workload.path} has {trace.layers} layers of {trace.expert_count} experts, "
                f"{geometry.name} has {geometry.layers} of {geometry.experts}"
            )
        if trace.top_k > geometry.experts:
            raise UsageError(f"trace {workload.path} routes {trace.top_k} of {geometry.experts} experts")
        return trace
    return synthetic(
        geometry.name,
        layers=geometry.layers,
        experts=geometry.experts,
        top_k=geometry.top_k,
        sequences=workload.requests,
        prefill=workload.prompt_tokens,
        decode=workload.new_tokens - 1,  # the first token comes out of the prefill
        seed=workload.seed,
    )


def _replay(cell: Cell, registry: Registry, progress: Progress) -> Row:
    config, geometry = cell.config, cell.geometry
    progress(f"trace of {geometry.name}")
    trace = load_trace(cell)
    if cell.spec.handling(config.knobs).matrices:
        geometry, trace = by_matrix(geometry, trace, config.layout, config.codec)
    context = int(trace.position.max()) + 1
    prompts = np.unique(trace.sequence[trace.phase == PREFILL], return_counts=True)[1]
    longest = int(prompts.max(initial=1)) if cell.computes else 0
    future = demands(trace, config) if cell.spec.foresees(config.knobs) else None
    target = Target(geometry.name, geometry, trace=trace, trees=not geometry.fixed_state_bytes, asked=_asked(config))
    equipment = cell.spec.equip(config.knobs, target)
    pack = None
    if cell.clock == "wall":
        from moebench.harness.random_pack import random_pack

        require_budget(cell, geometry, equipment)
        pack = random_pack(geometry, config.layout, config.codec, progress)
    repeats = config.repeats if cell.clock == "wall" else 1
    runs = []
    for _ in range(repeats):
        cache_state = environment.page_cache_state(cell, pack)
        session = open_session(
            cell, geometry, registry, pack=pack, dense_bytes=geometry.dense_bytes if cell.computes else 0,
            future=future, kv_bytes=None if cell.computes else (lambda: 0), warmup_tokens=config.warmup_tokens,
            batch=config.workload.batch, context=context if cell.computes else 0, longest_prompt=longest,
            equipment=equipment,
        )  # fmt: skip
        try:
            progress(f"{cell.spec.id} on {cell.profile.id}: {len(trace.sequence)} tokens of {geometry.name}")
            follow = (config.workload.batch, config.chunk, equipment.acceptance, config.seed)
            replay(trace, session.experts, *follow)
        finally:
            session.close()
        runs.append(session)
    kind = config.workload.kind if config.workload.kind == "trace" else "synthetic"
    workload = {
        "kind": kind,
        "seed": config.workload.seed,
        "hash": trace.hash,
        "generator": trace.metadata.get("generator"),
    }
    metrics = figures.speed(cell, runs)
    metrics |= figures.memory(cell, runs, process=cell.clock == "wall")
    metrics |= unasked("a replay has no model that answers")
    assumptions = []
    if "generator" in trace.metadata:
        how = trace.metadata.get("fitted", "with parameters of its own")
        assumptions.append(f"assumed: routing from a synthetic trace ({trace.metadata['source']}), {how}")
    assumptions += [*_narrowed(geometry.top_k, equipment), *equipment.assumptions]
    if equipment.acceptance is not None and not has_drafts(trace):
        assumptions.append(equipment.acceptance.assumption())
    if trace.top_k != geometry.top_k:
        assumptions.append(f"assumed: routing of {trace.top_k} experts a token for a model of {geometry.top_k}")
    if config.codec != "none" and pack is None:
        ratio = coded_bytes(geometry) / geometry.expert_bytes
        assumptions.append(f"assumed: experts coded to {ratio:.3f} of their bytes, as Gaussian weights are")
    if not cell.computes:
        assumptions.append("input/output only: experts are read, nothing computes, no dense weights are held")
    return run_row(cell, runs, workload, metrics, cache_state, assumptions, equipment)


def demands(trace: Trace, config: RunConfig) -> list[tuple[int, list[int]]]:
    """All demands of a trace in the order of the loop, for an oracle."""
    from moebench.engine.loop import replay_steps
    from moebench.step import Routing

    found = []
    for step, rows, _ in replay_steps(trace, config.workload.batch, config.chunk):
        ids = trace.experts[rows]
        for layer in range(trace.layers):
            base = layer * trace.expert_count
            found.append((layer, [base + e for e in Routing(ids[:, layer], None).demand(step.valid)]))
    return found


# --- live ----------------------------------------------------------------------------------------------------------


def _live(cell: Cell, registry: Registry, progress: Progress) -> Row:
    config = cell.config
    progress(f"loading {cell.model}")
    fewest = Equipment(top_k=None if cell.spec.fidelity(config.knobs) == "exact" else 1)  # what it brings comes later
    require_budget(cell, folder_geometry(cell.folder, cell.model, config.quant), fewest)
    packed = (config.quant, config.layout, config.order, config.codec)
    model = load_live(cell.folder, cell.model, *packed, config.backend, config.device)
    suite = suite_for(config, model)
    backend = open_backend(config.backend, model, config.numerics, cell.threads, config.device)
    prompts = _prompts(cell)
    ids = [model.tokenizer(p)["input_ids"] for p in prompts]
    if not all(ids):
        raise UsageError(f"a prompt of {config.workload.path} is empty: it has no tokens")
    batches = [ids[i : i + config.workload.batch] for i in range(0, len(ids), config.workload.batch)]
    equipment = _equip(cell, model, backend)
    model = with_drafter(model, backend, equipment.draft)
    stop = model.ends
    context = max(map(len, ids)) + config.workload.new_tokens

    def decode(session: Session) -> None:
        loop = Loop(backend, session.experts, config.chunk)
        for batch in batches:
            loop.generate(batch, config.workload.new_tokens, stop=stop)
        session.experts.drain()

    runs: list[Session] = []
    for _ in range(config.repeats if cell.clock == "wall" else 1):
        cache_state = environment.page_cache_state(cell, model.pack)
        progress(f"{cell.spec.id} on {cell.profile.id}: {len(prompts)} prompts through {cell.model}")
        sizes = (context, config.warmup_tokens, config.workload.batch)
        with Sessions(cell, registry, model, backend, equipment, *sizes) as fresh:
            decode(session := fresh(decode))
        runs.append(session)
    metrics = figures.speed(cell, runs)
    metrics |= figures.memory(cell, runs, cell.clock == "wall", backend.allocator_peak_bytes())
    quality: dict[str, Any] = {}
    if suite is None:
        metrics |= unasked("quality=none")
    else:
        numbers, quality = ask(suite, Asked(cell, registry, model, backend, equipment), progress)
        metrics |= numbers
    workload = {"kind": "prompts", "seed": config.workload.seed, "hash": text_hash(prompts), "generator": None}
    notes = [*backend.notes, *_narrowed(model.geometry.top_k, equipment), *equipment.assumptions]
    if context > model.positions:
        notes.append(f"altered: texts of up to {context} tokens through a model made for {model.positions}")
    row = run_row(cell, runs, workload, metrics, cache_state, notes, equipment)
    return replace(row, quality=quality)


def _narrowed(own: int, equipment: Equipment) -> list[str]:
    """The line that says when fewer experts run than the model would."""
    if equipment.top_k in (None, own):
        return []
    return [f"altered: {equipment.top_k} of the model's own {own} experts run for each token and layer"]


def _equip(cell: Cell, model: LiveModel, backend: Any) -> Equipment:
    """What the system brings for this model; its adapters are served from here on."""
    held = backend.ops.number_bytes if cell.clock == "wall" else 0
    known = (model.pack.manifest.model["weights_hash"], model.config, backend.selection_bias(), held)
    target = Target(cell.model, model.geometry, *known, trees=backend.trees, asked=_asked(cell.config))
    equipment = cell.spec.equip(cell.config.knobs, target)
    backend.adapt(equipment.adapters)
    return equipment


def _asked(config: RunConfig) -> str:
    return "" if config.model == "auto" else config.model


def _prompts(cell: Cell) -> list[str]:
    workload = cell.config.workload
    if workload.kind == "prompts" and workload.path:
        path = Path(workload.path)
    else:
        path = Path(str(resources.files("moebench.models.tinymoe"))) / "tasks" / "prompts.jsonl"
    return read_prompts(path, workload.requests, workload.seed)
