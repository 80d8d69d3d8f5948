"""``moebench model random``: a folder of random weights in the sizes of any geometry, for work on storage."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from moebench import model_card
from moebench.commands.places import writable_folder
from moebench.commands.words import parse
from moebench.config import option
from moebench.errors import UsageError
from moebench.plugins import load_plugins
from moebench.progress import progress_bar
from moebench.units import GIB, human_bytes


@dataclass(frozen=True)
class RandomOptions:
    """Whose sizes, how much of it, and where it goes."""

    geometry: str = dataclasses.field(metadata={"help": "model geometry by name, or a YAML file of one"})
    out: str = dataclasses.field(metadata={"help": "model folder to write; must not exist"})
    layers: int | None = option(None, "layers with experts; all of the geometry's without it")
    experts: int | None = option(None, "experts in each layer; all of the geometry's without it")
    gib: float | None = option(None, "as many layers as fit in so many GiB")
    quant: Literal["none", "int4"] = option("none", "bf16 as on the hub, or 4 bits in groups of 64 as MLX stores them")
    router: Literal["uniform", "zipf"] = option("uniform", "all experts of a layer used alike, or by a law of ranks")
    seed: int = option(0, "of the weights")

    def __post_init__(self) -> None:
        if self.layers is not None and self.gib is not None:
            raise UsageError("model random: layers=N and gib=X both say how many layers; give one of them")
        if self.seed < 0:
            raise UsageError(f"model random: seed must be at least 0, got {self.seed}")


def main(words: Sequence[str]) -> int:
    """Write the folder with a progress bar on stderr, say what it is and how fast it was written."""
    options = parse(words, RandomOptions, "model random")
    if options is None:
        return 0
    known = options.geometry.endswith((".yaml", ".yml"))
    card = model_card.load(options.geometry if known else load_plugins().model_path(options.geometry))
    out = Path(options.out).expanduser()
    if out.exists():
        raise UsageError(f"out={options.out} exists already; nothing was written")
    writable_folder(out.parent, f"out={options.out}: folder")
    if not card.geometry.vocabulary:
        raise UsageError(f"geometry {card.geometry.name} says no vocabulary, which a model needs")
    from moebench.checkpoint.random_config import is_stand_in
    from moebench.checkpoint.random_router import shares
    from moebench.checkpoint.random_write import quantization, write_random

    experts = card.geometry.experts if options.experts is None else options.experts
    share = shares(experts, card.geometry.top_k, options.router)
    config, plan = _choose(card, options, experts)
    if options.quant == "int4":
        config = {**config, "quantization": quantization(), "quantization_config": quantization()}
    stand_in, shape = is_stand_in(card, config), card.geometry
    origin = {key: getattr(options, key) for key in ("geometry", "quant", "router", "seed")}
    started = time.perf_counter()
    with progress_bar() as bar:
        task = bar.add_task("MiB", total=plan.nbytes >> 20)
        written = [0]

        def progress(nbytes: int) -> None:
            written[0] += nbytes
            bar.update(task, completed=written[0] >> 20)

        made = {**origin, "family": config["model_type"], "stand_in": stand_in}
        files = write_random(out, plan, config, options.router, options.seed, made, progress)
    rate = plan.nbytes / (time.perf_counter() - started) / 1e6
    print(
        f"{out}: {config['model_type']}, {plan.layers} of {shape.layers} layers x {plan.experts} experts,"
        f" top-{plan.top_k}, {human_bytes(plan.nbytes)} in {len(files)} files, {rate:.0f} MB/s"
    )
    if stand_in:
        print(
            f"a stand-in for {shape.name}: its experts, their counts, hidden size and vocabulary in a Qwen3-MoE, whose"
            " attention is another and which has no shared experts and no dense layers"
        )
    print(
        f"routing: the most used expert of a layer serves {share[0]:.1%} of the tokens, the least used {share[-1]:.1%}"
    )
    print(f"next: moebench run system=lru hw=m4pro model={out}")
    document = {"model": str(out), "bytes": plan.nbytes, "files": len(files), "layers": plan.layers, "mb_s": rate}
    print(json.dumps({**document, **made}, separators=(",", ":")))
    return 0


def _choose(card: model_card.ModelCard, options: RandomOptions, experts: int) -> tuple[dict[str, Any], Any]:
    """Configuration and tensors for the layers that were asked for, or that fit."""
    from moebench.checkpoint.random_config import configure
    from moebench.checkpoint.random_plan import plan

    shape = card.geometry

    def of(layers: int) -> tuple[dict[str, Any], Any]:
        config = configure(card, layers, experts, options.quant)
        return config, plan(config, shape.top_k, options.quant, options.seed)

    if options.gib is None:
        return of(shape.layers if options.layers is None else options.layers)
    one = of(1)[1].nbytes
    if not options.gib * GIB >= one:
        raise UsageError(f"gib={options.gib:g} is too small: one layer and what surrounds it take {one / GIB:.2f} GiB")
    each = of(2)[1].nbytes - one if shape.layers > 1 else one
    layers = int(min(shape.layers, 1 + (options.gib * GIB - one) // each))
    while (chosen := of(layers))[1].nbytes > options.gib * GIB:  # layers differ in size
        layers -= 1
    if layers == shape.layers and chosen[1].nbytes + each <= options.gib * GIB:
        raise UsageError(f"gib={options.gib:g} is more than all of {shape.name}, {chosen[1].nbytes / GIB:.2f} GiB")
    return chosen
