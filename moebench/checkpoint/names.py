"""Which tensors of a checkpoint make which parameter of the transformers model, by transformers' own conversion tables.

No family is known by name here: renamings and conversions are those that ``from_pretrained`` applies, on an empty
model. A conversion is run for one expert alone, on that expert's tensors, since none of them mixes experts. Knows names
and shapes; reads no file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from moebench.backends.torch_experts import expert_modules, expert_parameters
from moebench.checkpoint.decode import ACTIVATION_SCALES
from moebench.store.engines import StoreError

Read = Callable[[str, int, int | None], torch.Tensor]  # rows of a checkpoint tensor by name
# Parts of a multimodal checkpoint that a text model has no use for (names as in transformers and on the hub).
OTHER_TOWERS = re.compile(
    r"^(model\.)?(visual|vision_\w+|audio_\w+|multi_modal_projector|mm_projector|image_newline|vit|embed_vision|embed_audio)\b"
)


@dataclass
class Recipe:
    """How one or several parameters are made: of ``sources`` (pattern to checkpoint names), by ``converter`` if any."""

    first: str  # the parameter, or the first of several
    converter: WeightConverter | None = None
    sources: dict[str, list[str]] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """All checkpoint tensors that it takes."""
        return [name for names in self.sources.values() for name in names]

    @property
    def targets(self) -> list[str]:
        """All parameters that it makes."""
        if self.converter is None:
            return [self.first]
        head, *others = self.converter.target_patterns
        return [self.first, *(self.first.replace(head, other) for other in others)]

    def make(self, model: Any, read: Read) -> dict[str, torch.Tensor]:
        """All parameters, whole."""
        return self._run(model, {pattern: [read(n, 0, None) for n in names] for pattern, names in self.sources.items()})

    def make_expert(self, model: Any, read: Read, expert: int, experts: int, dims: int) -> torch.Tensor:
        """One expert's part [...] of the parameter [E, ...] with ``dims`` dimensions."""
        tensors = {}
        for pattern, names in self.sources.items():
            if len(names) == experts and f".{expert}." in names[expert]:
                tensors[pattern] = [read(names[expert], 0, None)]
            else:
                tensors[pattern] = [read(name, expert, expert + 1) for name in names]
        made = self._run(_OneExpert(model), tensors)[self.first]
        return made[0] if made.dim() == dims else made

    def _run(self, model: Any, tensors: dict[str, list[torch.Tensor]]) -> dict[str, torch.Tensor]:
        if self.converter is None:
            return {self.first: next(iter(tensors.values()))[0]}
        converter: Any = copy(self.converter)  # experts are made by several threads
        converter.collected_tensors = dict(tensors)
        try:
            made = converter.convert(self.first, model=model, config=model.config)
        except Exception as error:  # torch raises whatever shapes that do not go together lead it to
            said = " ".join(str(error).split())[:200]
            raise StoreError(f"{', '.join(self.names[:3])} do not make {self.first}: {said}") from None
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


class _OneExpert:
    """The model as a conversion sees it that asks for the shape of a parameter of one expert."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.config = model, model.config

    def get_parameter(self, name: str) -> torch.Tensor:
        """The parameter of the first expert alone, [1, ...]."""
        return self.model.get_parameter(name)[:1]


@dataclass(frozen=True)
class Names:
    """Recipes of a checkpoint for a model: ``experts`` by parameter name, ``dense`` by first parameter name."""

    experts: Mapping[str, Recipe]
    dense: Mapping[str, Recipe]
    left_out: tuple[str, ...]  # checkpoint names that this model has no use for, as transformers or the config says


def resolve(model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]], where: str) -> Names:
    """Place every checkpoint tensor; raises ``StoreError`` naming tensors that are missing or that nobody claims."""
    wanted = model.state_dict(keep_vars=True)
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    owner = {pattern: c for c in converters for pattern in c.source_patterns}
    ignored = _ignored(model)
    recipes: dict[str, Recipe] = {}
    left_out, unknown = [], []
    prefix = model.base_model_prefix
    for name in sorted(shapes, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, wanted)
        if target not in wanted and name in wanted:
            target, pattern = name, None
        if target in wanted:
            recipe = recipes.setdefault(target, Recipe(target, owner[pattern] if pattern else None))
            recipe.sources.setdefault(pattern or name, []).append(name)
        elif ignored(target) or ignored(name):
            left_out.append(name)
        else:
            unknown.append(name)
    if unknown:
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise StoreError(f"{where}: {type(model).__name__} has no place for {', '.join(unknown[:3])}{more}")
    routed = {f"{m}.{p}" for m, module in expert_modules(model).items() for p in expert_parameters(module)}
    experts = {name: recipe for name, recipe in recipes.items() if name in routed}
    names = Names(experts, {n: r for n, r in recipes.items() if n not in routed}, tuple(left_out))
    if missing := sorted(routed - set(experts), key=dot_natural_key):
        raise StoreError(f"{where}: lacks {len(missing)} tensors of experts: {', '.join(missing[:3])}")
    for name, recipe in experts.items():
        _check_experts(where, name, recipe, shapes, tuple(wanted[name].shape))
    return names


def _check_experts(
    where: str, name: str, recipe: Recipe, shapes: Mapping[str, tuple[int, ...]], shape: tuple[int, ...]
) -> None:
    """Each source must be one tensor of all experts, or one of each expert by its number."""
    experts = shape[0]
    for names in recipe.sources.values():
        if len(names) == 1 and len(shapes[names[0]]) == len(shape):
            if shapes[names[0]][0] != experts:
                raise StoreError(f"{where}: {names[0]} {list(shapes[names[0]])} is not of {experts} experts")
        elif len(names) != experts or any(f".{e}." not in n for e, n in enumerate(names)):
            raise StoreError(
                f"{where}: {name} needs {experts} experts, the checkpoint has {len(names)}: {', '.join(names[:3])}"
            )


def _ignored(model: PreTrainedModel) -> Callable[[str], bool]:
    """Whether a checkpoint tensor is one that the model has no use for.

    transformers' own lists, computed frequencies, prediction layers behind the last layer, scales of activations, and
    other towers where the configuration is a multimodal one.
    """
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$", r"(^|\.)mtp\."]
    found = re.compile("|".join(f"({p})" for p in patterns))
    layer = re.compile(r"(?:^|\.)layers\.(\d+)\.")
    depth = model.config.get_text_config().num_hidden_layers

    def ignored(name: str) -> bool:
        beyond = (match := layer.search(name)) is not None and int(match[1]) >= depth
        return bool(beyond or found.search(name) or name.endswith(ACTIVATION_SCALES) or OTHER_TOWERS.search(name))

    return ignored
