"""What ``moebench list`` says of a geometry in full: every term with its formula and bytes, what a token costs, and
figures that others published beside what the formulas give.

Knows no model by name and reads no weights.
"""

from __future__ import annotations

from collections.abc import Iterator

from moebench.geometry import FORMULAS, Geometry
from moebench.model_card import ModelCard, Published
from moebench.units import human_bytes

STATES = ("kept for each token of context", "kept whatever the context")  # in the order of FORMULAS


def summary(shape: Geometry) -> str:
    """One line of a geometry."""
    return (
        f"{shape.layers} layers x {shape.experts} experts, top-{shape.top_k}, {human_bytes(shape.routed_bytes)} routed"
    )


def describe(card: ModelCard) -> Iterator[str]:
    """Lines for people, the short one first."""
    shape = card.geometry
    yield summary(shape)
    sizes = ("hidden", "intermediate", "shared_intermediate", "dense_layers", "dense_intermediate", "vocabulary")
    yield ", ".join(f"{name} {getattr(shape, name)}" for name in sizes if getattr(shape, name))
    if card.config:
        numbers = [f"{key} {value}" for key, value in card.config.items() if type(value) in (int, float)]
        yield f"config.json: {card.config['model_type']}, {', '.join(numbers)}"
    yield f"{'':<22} {'parameters':>17} {'bytes':>11}  formula; {shape.quant} at {shape.bits_per_weight:g} bits"
    yield from (_row(*term) for term in _terms(card))
    yield from _costs(card)
    yield from map(_beside, card.published)
    yield from (f"{key}: {text}" for key, text in shape.sources.items())


def _terms(card: ModelCard) -> Iterator[tuple[str, int, float, str]]:
    """Name, parameters, bytes and formula of each term and of what they add up to."""
    shape = card.geometry
    matrices = "" if shape.matrices == 1 else f"{shape.matrices} * "
    yield "expert", shape.expert_parameters, shape.expert_bytes, f"{matrices}hidden * intermediate"
    yield "routed experts", shape.keys * shape.expert_parameters, shape.routed_bytes, "layers * experts * expert"
    always = [
        ("shared experts", shape.shared_parameters, "layers * shared_experts * 3 * hidden * shared_intermediate"),
        ("dense blocks", shape.dense_block_parameters, "dense_layers * 3 * hidden * dense_intermediate"),
    ]
    formulas = card.data.get("parts", {})
    parts = card.parts or {"other_parameters": shape.other_parameters}
    always += [(name.replace("_", " "), count, str(formulas.get(name, "as given"))) for name, count in parts.items()]
    for name, count, formula in always:
        if count:
            yield name, count, count * shape.bits_per_weight / 8, formula
    yield "always resident", shape.dense_parameters, shape.dense_bytes, "all but the routed experts"
    yield "all", shape.parameters, shape.routed_bytes + shape.dense_bytes, "routed experts + always resident"
    touched = shape.layers * shape.top_k * shape.expert_bytes
    active = shape.active_parameters
    yield "met by a token", active, touched + shape.dense_bytes, "always resident + layers * top_k * expert"
    yield "of it experts", active - shape.dense_parameters, touched, "layers * top_k * expert: read without reuse"


def _costs(card: ModelCard) -> Iterator[str]:
    """State and arithmetic of a token."""
    shape = card.geometry
    for name, what in zip(FORMULAS, STATES, strict=True):
        if value := getattr(shape, name):
            yield f"{what}: {human_bytes(value)} = {card.data[name]}"
    experts = 2 * (shape.active_parameters - shape.dense_parameters)
    lookup = "" if shape.tied else " - the input embedding, which is looked up"
    yield f"FLOPs of a token: {shape.dense_flops_per_token:.4g} = 2 * (always resident{lookup})"
    yield f"    and {experts:.4g} = 2 * layers * top_k * expert"
    if card.context_flops:
        yield (
            f"    and {card.context_flops:.4g} for each token before it = {card.data['context_flops']}"
            " (attention; modeled times count the bytes of its state, not these)"
        )


def _row(name: str, count: int, nbytes: float, formula: str) -> str:
    return f"{name:<22} {count:>17,} {human_bytes(nbytes):>11}  {formula}"


def _beside(entry: Published) -> str:
    """A published figure, what the formula gives in its unit, and how far that is off."""
    computed = entry.computed if float(entry.computed).is_integer() else float(f"{entry.computed:.7g}")
    here = f"{computed:,.10g} = {entry.formula} ({entry.gap:+.2%})"
    why = f"; {entry.why}" if entry.why else ""
    return f"published, {entry.what}: {entry.value:,.10g} {entry.unit}, here {here}; {entry.source}{why}"
