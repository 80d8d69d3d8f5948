"""``moebench list [systems|hardware|models|engines] [-v]``: everything that can be named, read from the registry."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

from moebench import geometry, hardware
from moebench.errors import unknown
from moebench.plugins import Registry, load_plugins
from moebench.units import human_bytes

USAGE = "usage: moebench list [systems|hardware|models|engines ...] [-v]\n"
KINDS = ("systems", "hardware", "models", "engines")


def main(words: Sequence[str]) -> int:
    """Print the chosen kinds, all without a choice; ``-v`` adds knobs, sources and derived bytes."""
    if any(word in ("-h", "--help") for word in words):
        print(USAGE, end="")
        return 0
    verbose = any(word in ("-v", "--verbose") for word in words)
    kinds = [word for word in words if word not in ("-v", "--verbose", "debug=true", "debug=false")]
    for kind in kinds:
        if kind not in KINDS:
            raise unknown("kind", kind, KINDS)
    registry = load_plugins()
    for kind in kinds or KINDS:
        print(kind)
        for name in sorted(getattr(registry, kind)):
            try:
                lines = DESCRIBE[kind](registry, name, verbose)
            except ValueError as error:
                print(f"moebench: warning: {error}", file=sys.stderr)
                continue
            owner = registry.origin[f"{kind}/{name}"]
            source = f"   from {owner}" if owner != "moebench" else ""
            print(f"  {name:<24} {lines[0]}{source}".rstrip())
            for line in lines[1:]:
                print(f"  {'':<24} {line}")
    return 0


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
        lines += [f"{key} {q.value:g} {q.unit}  {q.kind}: {q.text}" for key, q in profile.quantities.items()]
        lines += [f"read_curve  {profile.read_curve.kind}: {profile.read_curve.text}"]
        for stack in profile.stacks.values():
            for key, q in stack.quantities.items():
                moved = f" (transferred from {q.machine})" if q.machine else ""
                lines.append(f"{stack.name}.{key} {q.value:g} {q.unit}{moved}  {q.kind}: {q.text}")
    return lines


def _model(registry: Registry, name: str, verbose: bool) -> list[str]:
    shape = geometry.load(registry.model_path(name))
    lines = [
        f"{shape.layers} layers x {shape.experts} experts, top-{shape.top_k}, {human_bytes(shape.routed_bytes)} routed"
    ]
    if verbose:
        touched = shape.layers * shape.top_k * shape.expert_bytes
        lines += [
            f"one expert {human_bytes(shape.expert_bytes)}"
            f" = 3 * {shape.hidden} * {shape.intermediate} * {shape.bits_per_weight:g} / 8",
            f"routed {human_bytes(shape.routed_bytes)} = {shape.layers} * {shape.experts} * {shape.expert_bytes} B",
            f"dense {human_bytes(shape.dense_bytes)}; touched per token without reuse {human_bytes(touched)}",
            *(f"{key}: {text}" for key, text in shape.sources.items()),
        ]
    return lines


def _engine(registry: Registry, name: str, verbose: bool) -> list[str]:
    return [(registry.engine(name).__doc__ or "").strip().split("\n")[0]]


DESCRIBE = {"systems": _system, "hardware": _hardware, "models": _model, "engines": _engine}
