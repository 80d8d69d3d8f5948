"""Drafts of every kind, a system that drafts them, and tiny models to verify them, for tests of speculation."""

from __future__ import annotations

import numpy as np
from engine_fixtures import costs
from torch_models import make_backend, make_pack, native_model

from moebench.backends.torch_geometry import geometry_of
from moebench.backends.torch_source import TransformersSource
from moebench.draft import Draft
from moebench.engine.acquire import Experts
from moebench.engine.hooks import Hooks
from moebench.engine.loop import Loop
from moebench.hookspecs import hookimpl
from moebench.residency.tier import Tier
from moebench.store.engines import open_engine
from moebench.store.layout import QuantSpec
from moebench.store.pages import aligned_buffer
from moebench.timeline.filled import FilledTimeline

VOCABULARY = 96
HOST_SYNC_S = 1e-3
HYBRIDS = {
    "qwen3_next": {
        "num_experts": 8, "moe_intermediate_size": 32, "intermediate_size": 48, "shared_expert_intermediate_size": 32,
        "num_hidden_layers": 4, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "lfm2_moe": {
        "num_experts": 8, "moe_intermediate_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_dense_layers": 1, "layer_types": ["conv", "full_attention"] * 2,
    },
    "bailing_hybrid": {
        "num_local_experts": 8, "moe_intermediate_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "num_key_value_heads": 4, "kv_lora_rank": 16,
        "q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "layer_group_size": 2,
        "num_mtp_layers": 0,
    },
}  # fmt: skip


def tree(rng: np.random.Generator, nodes: int, truth: list[int] = (), right: float = 0.0, twins: bool = False) -> Draft:
    """A random tree; each node is right with probability ``right`` where ``truth`` says what comes at its depth."""
    parents = np.array([rng.integers(-1, i) if i else -1 for i in range(nodes)], np.int32)
    blank = Draft(np.zeros(nodes), parents, rng.random(nodes))
    tokens = rng.integers(0, VOCABULARY, nodes)
    for node, depth in enumerate(blank.depth.tolist()):
        if depth <= len(truth) and rng.random() < right:
            tokens[node] = truth[depth - 1]
        elif twins and node:
            tokens[node] = tokens[node - 1]
    return Draft(tokens, parents, blank.probability)


class Drafting:
    """A system that drafts what ``guess(sequence, tokens)`` says and verifies what ``cut(draft)`` keeps."""

    def __init__(self, guess, cut=None, syncs=0) -> None:
        self.guess, self.cut, self.syncs, self.steps, self.asked = guess, cut, syncs, [], []

    @hookimpl
    def draft(self, sequence, tokens, view):
        self.asked.append((sequence, tokens.copy()))
        view.account(syncs=self.syncs)
        return self.guess(sequence, tokens)

    @hookimpl
    def prune(self, draft):
        return None if self.cut is None else self.cut(draft)

    @hookimpl
    def end_step(self, step):
        self.steps.append(step)


def ancestors_closed(rng: np.random.Generator):
    """A pruning that keeps a random ancestor-closed part of any draft."""

    def cut(draft: Draft) -> np.ndarray:
        kept = np.zeros(len(draft), bool)
        for node, parent in enumerate(draft.parents.tolist()):
            kept[node] = (parent < 0 or kept[parent]) and rng.random() < 0.7
        return kept

    return cut


class Desk:
    """One tiny model in a pack with a backend; answers prompts under any plugins and cache size on a modeled clock."""

    def __init__(self, folder, family="qwen3_moe", quant="none", dtype="bfloat16", numerics="row_invariant", **changes):
        model = native_model(family, **changes)
        self.pack = make_pack(folder, model, QuantSpec(quant, 32), dtype)
        self.backend = make_backend(self.pack, dtype=dtype, numerics=numerics)
        self.geometry = geometry_of(TransformersSource(model, dtype).model["config"], "model", quant)

    def answer(self, prompts, new_tokens=12, plugins=(), slots=None, **options):
        """Tokens and logits of one batch."""
        pack, geometry = self.pack, self.geometry
        count = slots or geometry.keys
        arena = aligned_buffer(count * pack.slot_bytes).reshape(count, pack.slot_bytes)
        tiers = [Tier("device", count, pack.slot_bytes, geometry.layers, geometry.experts, "shared", arena)]
        timeline = FilledTimeline(
            costs(host_sync_s=HOST_SYNC_S), open_engine("pread", pack), lambda name, slot: arena[slot]
        )
        try:
            self.experts = Experts(geometry, tiers, timeline, Hooks(list(plugins)))
            out = Loop(self.backend, self.experts, 8).generate(prompts, new_tokens, keep_logits=True, **options)
            self.experts.drain()
            self.experts.check_integrity()
            self.elapsed = timeline.now()
        finally:
            timeline.close()
        return out
