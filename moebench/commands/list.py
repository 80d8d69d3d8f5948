"""``moebench list [systems|hardware|models|engines|NAME ...] [-v]``: what can be named, or one thing in full."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence

from moebench import geometry, hardware, model_card
from moebench.commands import model_figures
from moebench.errors import unknown
from moebench.geometry import EMBEDDED
from moebench.plugins import Registry, load_plugins

USAGE = """usage: moebench list [systems|hardware|models|engines|NAME ...] [-v]

  a kind lists its names, -v with options, sources and derived sizes; a NAME shows that thing with all of it
"""
KINDS = ("systems", "hardware", "models", "engines")


def main(words: Sequence[str]) -> int:
    """Print kinds and single things, all kinds without a choice; ``-v`` adds knobs, sources and derived bytes."""
    if any(word in ("-h", "--help") for word in words):
        print(USAGE, end="")
        return 0
    verbose = any(word in ("-v", "--verbose") for word in words)
    chosen = [word for word in words if word not in ("-v", "--verbose", "debug=true", "debug=false")]
    registry = load_plugins()
    names = {kind: sorted(getattr(registry, kind)) for kind in KINDS}
    names["models"] = [EMBEDDED, *names["models"]]
    for word in chosen:
        if word not in KINDS and not any(word in known for known in names.values()):
            raise unknown("kind or name", word, {*KINDS, *(name for known in names.values() for name in known)})
    for kind in KINDS:
        if not chosen or kind in chosen:
            print(kind)
            _show(registry, kind, names[kind], verbose)
        else:
            _show(registry, kind, [name for name in names[kind] if name in chosen], True)
    return 0


def _show(registry: Registry, kind: str, names: Sequence[str], verbose: bool) -> None:
    for name in names:
        try:
            lines = DESCRIBE[kind](registry, name, verbose)
        except ValueError as error:
            print(f"moebench: warning: {error}", file=sys.stderr)
            continue
        owner = registry.origin.get(f"{kind}/{name}", "moebench")
        source = f"   from {owner}" if owner != "moebench" else ""
        print(f"  {name:<24} {lines[0]}{source}".rstrip())
        for line in lines[1:]:
            print(f"  {'':<24} {line}")


def _system(registry: Registry, name: str, verbose: bool) -> list[str]:
    spec = registry.system(name)
    traits = [spec.fidelity(spec.config()), *(["oracle"] if spec.oracle else [])]
    lines = [f"{spec.title} ({', '.join(traits)}): {spec.summary}"]
    if verbose:
        lines += [f"paper: {spec.paper}"] if spec.paper else []
        lines += [f"needs: {', '.join(spec.needs)}"] if spec.needs else []
        for knob in dataclasses.fields(spec.config):
            default = knob.default if knob.default is not dataclasses.MISSING else knob.default_factory()  # type: ignore[misc,operator]
            lines.append(f"system.{knob.name}={default}  {knob.metadata.get('help', '')}".rstrip())
    return lines


def _hardware(registry: Registry, name: str, verbose: bool) -> list[str]:
    profile = hardware.load(registry.hardware_path(name))
    lines = [profile.title]
    if verbose:
        lines += [f"reference model {profile.model}, engine {profile.engine}, stack {profile.stack}"]
        lines += [f"{key} {q.describe()}" for key, q in profile.quantities.items()]
        for stack in profile.stacks.values():
            lines += [f"{stack.name}.{key} {q.describe()}" for key, q in stack.quantities.items()]
        for name, curve in {"read_curve": profile.read_curve, **profile.curves}.items():
            lines.append(f"{name}  {curve.describe()}")
        lines += [f"not measured: {name}: {why}" for name, why in profile.unmeasured.items()]
    return lines


def _embedded(verbose: bool) -> list[str]:
    """The model that ships with its weights, from its own configuration."""
    config = json.loads((geometry.embedded_folder() / "config.json").read_text())
    layers, experts, top = (config[k] for k in ("num_hidden_layers", "num_local_experts", "num_experts_per_tok"))
    lines = [f"{layers} layers x {experts} experts, top-{top}; ships with its weights: answers, so it has a quality"]
    if verbose:
        lines += [f"{config['model_type']}, hidden {config['hidden_size']}, vocabulary {config['vocab_size']}"]
    return lines


def _model(registry: Registry, name: str, verbose: bool) -> list[str]:
    if name == EMBEDDED:
        return _embedded(verbose)
    card = model_card.load(registry.model_path(name))
    return list(model_figures.describe(card)) if verbose else [model_figures.summary(card.geometry)]


def _engine(registry: Registry, name: str, verbose: bool) -> list[str]:
    return [(registry.engine(name).__doc__ or "").strip().split("\n")[0]]


DESCRIBE = {"systems": _system, "hardware": _hardware, "models": _model, "engines": _engine}
