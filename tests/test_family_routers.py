"""Each family's routing law against transformers' own router, over random logits and over ties."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from family_checkpoints import FAMILIES, native
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moebench.backends.torch_experts import expert_modules, router_module
from moebench.backends.torch_routers import BIASES, selection_bias
from moebench.routing import LAW_OF_MODEL, RoutingError, law_of_config

NAMES = sorted(FAMILIES.keys() - {"gpt_oss_mxfp4", "qwen3_moe_fp8"})
CHANGES = {  # what a family's own configurations also hold
    "qwen3_moe-plain": {"norm_topk_prob": False},
    "deepseek_v2-greedy": {"topk_method": "greedy", "routed_scaling_factor": 16.0},
    "deepseek_v3-plain": {"norm_topk_prob": False, "routed_scaling_factor": 1.0},
    "lfm2_moe-unbiased": {"use_expert_bias": False},
}


def routed(model, logits):
    """What the model's own first router chooses for these logits [N, E], fed to it as hidden states."""
    name = next(iter(expert_modules(model)))
    router, seen = router_module(model, name), {}
    with torch.no_grad():
        router.weight.copy_(torch.eye(*router.weight.shape))
        for part, parameter in router.named_parameters(recurse=False):
            if part == "bias":
                parameter.zero_()
    hidden = torch.zeros(1, len(logits), router.weight.shape[1])
    hidden[0, :, : logits.shape[1]] = torch.from_numpy(logits)

    def caught(module, hidden_states, ids, weights):
        seen["ids"], seen["weights"] = ids.numpy(), weights.float().numpy()
        return torch.zeros_like(hidden_states)

    ALL_EXPERTS_FUNCTIONS.register("caught", caught)
    model.set_experts_implementation("caught")
    with torch.inference_mode():
        model.get_submodule(name.rpartition(".")[0])(hidden)
    return seen["ids"], seen["weights"]


def by_id(ids, weights):
    order = np.argsort(ids, 1)
    return np.take_along_axis(ids, order, 1), np.take_along_axis(weights, order, 1)


@pytest.mark.parametrize("case", [*NAMES, *CHANGES])
def test_ids_and_weights_are_the_routers(case):
    model = native(case.partition("-")[0], "float32", **CHANGES.get(case, {}))
    logits = np.random.default_rng(0).normal(0, 2, (400, 8)).astype(np.float32)
    bias = selection_bias(model, next(iter(expert_modules(model))))
    bias = None if bias is None else bias.numpy()
    ids, weights = by_id(*routed(model, logits))
    law = law_of_config(model.config.to_dict())
    mine = law.apply(logits, ids.shape[1], bias)
    np.testing.assert_array_equal(by_id(mine.experts, mine.weights)[0], ids)
    np.testing.assert_allclose(by_id(mine.experts, mine.weights)[1], weights, rtol=2e-6)
    if bias is not None:  # and it is the bias that chooses
        assert (np.sort(law.apply(logits, ids.shape[1]).experts) != ids).any()


@pytest.mark.parametrize("name", NAMES)
def test_ties_leave_the_weights_what_the_router_gives(name):
    """Among equal logits which expert is taken is free; what it weighs is not."""
    model = native(name, "float32")
    for buffer, tensor in (*model.named_buffers(), *model.named_parameters()):
        if buffer.rpartition(".")[2] in BIASES:
            tensor.data.zero_()
    logits = np.random.default_rng(1).integers(-2, 3, (300, 8)).astype(np.float32) / 2
    ids, weights = routed(model, logits)
    mine = law_of_config(model.config.to_dict()).apply(logits, ids.shape[1])
    chosen = np.sort(np.take_along_axis(logits, ids, 1)), np.sort(np.take_along_axis(logits, mine.experts, 1))
    same = (chosen[0] == chosen[1]).all(1)
    assert same.all() or name in ("deepseek_v2", "deepseek_v3", "glm4_moe", "bailing_hybrid", "dots1")  # tied groups
    np.testing.assert_allclose(np.sort(mine.weights)[same], np.sort(weights)[same], rtol=2e-6)
    assert same.mean() > 0.5


def test_what_a_configuration_leaves_out_is_what_transformers_takes():
    """A hub's config.json holds what differs from a class's defaults."""
    for kind in sorted(LAW_OF_MODEL.keys() & set(CONFIG_MAPPING) - {"qwen3_5_moe"}):
        whole = CONFIG_MAPPING[kind]().to_dict()
        assert law_of_config({"model_type": kind}) == law_of_config(whole), kind


def test_a_text_model_inside_another_has_its_law():
    nested = {"model_type": "qwen3_5_moe", "text_config": {"model_type": "qwen3_5_moe_text"}}
    assert law_of_config(nested) == law_of_config({"model_type": "qwen3_5_moe_text"})
    with pytest.raises(RoutingError, match=r"model type 'llama'; known: qwen2_moe, .*lfm2_moe"):
        law_of_config({"model_type": "whole", "text_config": {"model_type": "llama"}})
