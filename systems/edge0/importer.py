"""Heads and adapters as others published them, turned into this package's artefact. Needs torch.

Reads ``prerouter*.safetensors`` (``layers.N.{fc1,fc2,linear_init}.weight``, or the same below
``layers.N.mlp.prerouter.``) and optionally ``lora*.safetensors`` (``<module path>.lora_A``/``.lora_B``) of one folder.
N counts all layers of the model, dense ones included; metadata are texts: K, r, alpha, owners and others.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moebench.backends.base import Adapters
from moebench.backends.torch_lora import dense_projections
from moebench.errors import UsageError
from moebench.systems.edge0.artefact import Artefact, Base, paired, save
from moebench.systems.edge0.basemodel import open_base, served_top_k
from moebench.systems.edge0.heads import PARTS, Plan
from moebench.systems.edge0.prepare import PrepareOptions, place

KEY = re.compile(r"layers\.(\d+)\.(?:mlp\.prerouter\.)?(fc1|fc2|linear_init)\.weight")
TAKEN = ("k", "first_token", "last_layer", "alpha")  # options that mean something to an import
KEPT = ("model", "kind", "K", "r", "alpha", "owners", "source", "source_md5", "converted", "format_version")
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def convert(options: PrepareOptions, source: Path, folder: Path, name: str, out: Path) -> Path:
    """Write the artefact ``<name>-k<K>`` below ``out``; whatever does not fit the model at ``folder`` is one line."""
    given = [f.name for f in dataclasses.fields(options) if getattr(options, f.name) != f.default]
    if idle := [option for option in given if option not in TAKEN]:
        raise UsageError(f"import takes {', '.join(TAKEN)}; {', '.join(idle)} would change nothing")
    prerouter, lora = _only(source, "prerouter", True), _only(source, "lora", False)
    told, tensors = _read(prerouter)
    base, model = open_base(folder, name, "unknown")
    top_k = served_top_k(base, _agreed(prerouter, "K", told, options.k, "k"))
    dense = model.config.get_text_config().to_dict().get("first_k_dense_replace") or 0
    heads = _heads(prerouter, tensors, told, dense, base)
    if options.last_layer == "gate":
        heads.pop(base.layers - 2, None)
    if not heads:
        raise UsageError(f"{prerouter}: its only head is for the last layer, which takes last_layer=head")
    plan = Plan(base.layers, top_k, tuple(n + 1 for n in sorted(heads)), options.first_token)
    provenance: dict[str, Any] = {"imported": _origin(prerouter, told)}
    adapters = None
    if lora is not None:
        told, sides = _read(lora)
        _agreed(lora, "K", told, top_k, "k")
        adapters = _adapters(lora, sides, told, options, dense_projections(model))
        provenance["adapters"] = _origin(lora, told)
    elif options.alpha != PrepareOptions.alpha:
        raise UsageError(f"alpha={options.alpha:g} scales adapters, and {source} has no lora*.safetensors")
    try:
        made = Artefact(base, plan, heads, adapters, provenance)
    except UsageError as error:
        raise UsageError(f"{source} does not fit {name}: {error}") from None
    return save(made, place(out, name, top_k))


def _only(source: Path, stem: str, needed: bool) -> Path | None:
    found = sorted(source.glob(f"{stem}*.safetensors"))
    if len(found) > 1:
        raise UsageError(f"{source} holds {', '.join(f.name for f in found)}; leave one: each is for one K")
    if needed and not found:
        raise UsageError(f"{source} holds no {stem}*.safetensors")
    return found[0] if found else None


def _read(file: Path) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Metadata and fp16 tensors of one published file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(file), framework="pt") as opened:
            told, tensors = opened.metadata() or {}, {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{file} is unreadable: {' '.join(str(error).split())}") from None
    made = {}
    for key, tensor in tensors.items():
        if tensor.dtype not in FLOATS:
            raise UsageError(f"{file}: {key} is {tensor.dtype}, not one of fp16, bf16, fp32")
        if not torch.isfinite(half := tensor.to(torch.float16)).all():
            raise UsageError(f"{file}: {key} holds numbers that fp16 cannot")
        made[key] = half.contiguous().numpy()
    return told, made


def _agreed(file: Path, label: str, told: Mapping[str, str], given: int, option: str) -> int:
    """The file's number ``label``, else the option's; both must agree where both are there (0: not given)."""
    if label not in told:
        if not given:
            raise UsageError(f"{file} does not say its {label}; give {option}=N")
        return given
    number = _number(file, label, told)
    if given and number != given:
        raise UsageError(f"{file} is for {label} {number:g}, not for {option}={given}")
    return int(number)


def _number(file: Path, label: str, told: Mapping[str, str]) -> float:
    try:
        return float(told[label])
    except ValueError:
        raise UsageError(f"{file}: its {label} {told[label]!r} is not a number") from None


def _heads(
    file: Path, tensors: Mapping[str, np.ndarray], told: Mapping[str, str], dense: int, base: Base
) -> dict[int, dict[str, np.ndarray]]:
    """Heads by MoE layer of their owner."""
    heads: dict[int, dict[str, np.ndarray]] = {}
    for key, tensor in tensors.items():
        if not (matched := KEY.fullmatch(key)):
            raise UsageError(f"{file}: {key} is no tensor of a head: layers.N.{{{','.join(PARTS)}}}.weight")
        head = heads.setdefault(int(matched[1]), {})
        if matched[2] in head:
            raise UsageError(f"{file}: {matched[2]} of layer {matched[1]} is there twice")
        head[matched[2]] = tensor
    if not heads:
        raise UsageError(f"{file} holds no heads")
    owners = _owners(file, told)
    if owners is not None and owners != sorted(heads):
        raise UsageError(f"{file}: its metadata name owners {owners}, its tensors {sorted(heads)}")
    for owner in heads:
        if not 0 <= owner - dense < base.layers - 1:
            raise UsageError(
                f"{file}: layer {owner} cannot own a head: owners lie within {dense}..{dense + base.layers - 2}"
                f" of {base.model}"
            )
    return {owner - dense: head for owner, head in heads.items()}


def _owners(file: Path, told: Mapping[str, str]) -> list[int] | None:
    if "owners" not in told:
        return None
    try:
        text = told["owners"].strip()
        return sorted(int(n) for n in (json.loads(text) if text.startswith("[") else text.split(",")))
    except (ValueError, TypeError):
        raise UsageError(f"{file}: its owners {told['owners']!r} are no list of layers") from None


def _adapters(
    file: Path,
    sides: Mapping[str, np.ndarray],
    told: Mapping[str, str],
    options: PrepareOptions,
    projections: Mapping[str, torch.nn.Linear],
) -> Adapters:
    """Adapters by the model's own names; ranks, shapes and alpha are checked."""
    pairs = {}
    for published, (a, b) in paired(sides).items():
        parts = published.split(".")
        tails = [".".join(parts[i:]) for i in range(len(parts))]
        name = next((tail for tail in tails if tail in projections), None)
        if name is None:
            raise UsageError(
                f"{file}: {published} is no dense projection of the model, as are {', '.join(list(projections)[:3])}"
            )
        if name in pairs:
            raise UsageError(f"{file}: {name} is there twice")
        linear = projections[name]
        if a.ndim != 2 or b.ndim != 2 or (b.shape[0], a.shape[1]) != (linear.out_features, linear.in_features):
            raise UsageError(
                f"{file}: {published} has A {a.shape} and B {b.shape}; the projection maps {linear.in_features} to"
                f" {linear.out_features}"
            )
        pairs[name] = (a, b)
    ranks = {n for a, b in pairs.values() for n in (a.shape[0], b.shape[1])}
    if len(ranks) != 1:
        raise UsageError(f"{file}: adapters of ranks {sorted(ranks)}; one rank for all is needed")
    rank = ranks.pop()
    _agreed(file, "r", told, rank, "tensors' rank")
    alpha = _number(file, "alpha", told) if "alpha" in told else options.alpha
    if options.alpha not in (alpha, PrepareOptions.alpha):
        raise UsageError(f"{file} says alpha {alpha:g}, not alpha={options.alpha:g}")
    if not 0 < alpha < float("inf"):
        raise UsageError(f"{file}: alpha {alpha} is not a positive number")
    return Adapters(alpha / rank, pairs)


def _origin(file: Path, told: Mapping[str, str]) -> dict[str, Any]:
    """Which file it was and what it said of itself."""
    with open(file, "rb") as opened:
        digest = hashlib.file_digest(opened, "md5").hexdigest()
    return {"file": file.name, "md5": digest, "said": {key: told[key] for key in KEPT if key in told}}
