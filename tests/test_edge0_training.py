"""Edge0's student routes as the core does, in one pass as token by token; its losses are what they say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from edge0_fixtures import untrained
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_models import native_model

from moebench.routing import RoutingLaw, law_of_config
from moebench.store.layout import QuantSpec
from moebench.store.quant import dequantize, quantize
from moebench.systems.edge0.data import Example
from moebench.systems.edge0.heads import Plan, head_parameters, head_shapes
from moebench.systems.edge0.student import EXPERTS, Head, Student, dequantise_experts, differentiable
from moebench.systems.edge0.training import pad, reverse_kl

LAWS = [
    RoutingLaw("softmax_topk", renormalise=True),
    RoutingLaw("softmax_topk", renormalise=False),
    RoutingLaw("softmax_topk", renormalise=False, n_group=4, topk_group=2, scale=2.5),
    RoutingLaw("topk_softmax"),
    RoutingLaw("sparsemixer", renormalise=False, jitter=0.05),
    RoutingLaw("sigmoid_group", renormalise=True, n_group=4, topk_group=2, scale=2.5),
    RoutingLaw("sigmoid_group", renormalise=False, n_group=1, topk_group=1, scale=1.5),
]
STOP = 95


def student(family="qwen3_moe", first_token="gate", k=2, **changes):
    """A student of a random model, with heads and adapters that are not at their start."""
    model = native_model(family, num_hidden_layers=4, **{"num_experts_per_tok": 3, **changes})
    layers = 4 - int(family == "deepseek_v3")
    plan = Plan(layers, k, tuple(range(1, layers - 1)), first_token)
    made = Student(model, law_of_config(model.config.to_dict()), plan, rank=2, alpha=4.0)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return made


@pytest.mark.parametrize("law", LAWS, ids=lambda law: f"{law.name}-{law.renormalise}")
@settings(max_examples=20)
@given(k=st.integers(1, 4), seed=st.integers(0, 1000))
def test_the_differentiable_law_is_the_cores_law(law, k, seed):
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((6, 8)).astype(np.float32)
    bias = rng.standard_normal(8).astype(np.float32) if law.scores else None
    core = law.apply(logits, k, bias)
    given_logits = torch.tensor(logits, requires_grad=True)
    ids, weights = differentiable(law, given_logits, k, None if bias is None else torch.tensor(bias))
    assert np.array_equal(ids, core.experts)
    np.testing.assert_allclose(weights.detach(), core.weights, rtol=2e-6)
    (weights * torch.arange(1.0, k + 1)).sum().backward()
    assert torch.isfinite(given_logits.grad).all()


def routed(made, run):
    """What each layer executed while ``run()`` ran: layer -> (ids, weights)."""
    seen, original = {}, made.route

    def spy(layer, hidden, ids, weights):
        seen[layer] = original(layer, hidden, ids, weights)
        return seen[layer]

    made.route = spy
    with torch.no_grad():
        run()
    made.route = original
    return seen


@pytest.mark.parametrize(("family", "k"), [("qwen3_moe", 1), ("qwen3_moe", 2), ("olmoe", 2), ("granitemoe", 2)])
def test_native_routing_with_fewer_experts_is_the_law_with_fewer_experts(family, k):
    made = student(family, k=k)
    made.mode = "native"
    ids = torch.randint(0, 90, (2, 9))
    seen = routed(made, lambda: made(ids, torch.tensor([4, 6])))
    assert sorted(seen) == list(range(made.plan.layers))
    for layer, (chosen, weights) in seen.items():
        logits = made.router_logits[layer].reshape(-1, made.experts).numpy()
        core = made.law.apply(logits, k)
        assert np.array_equal(chosen, core.experts)
        np.testing.assert_allclose(weights, core.weights, rtol=1e-5)


@pytest.mark.parametrize("first_token", ["gate", "heads"])
def test_predictions_rule_where_they_should_and_nowhere_else(first_token):
    made = student(first_token=first_token)
    ids, prompt = torch.randint(0, 90, (2, 9)), torch.tensor([4, 6])
    seen = routed(made, lambda: made(ids, prompt))
    late = int(first_token == "gate")
    for layer in range(4):
        own = made.law.apply(made.router_logits[layer].reshape(-1, made.experts).numpy(), 2)
        differs = (seen[layer][0].numpy() != own.experts).any(1).reshape(2, 9)
        for row in range(2):
            assert not differs[row, : prompt[row] + late].any()
        if layer in made.plan.consumers:
            said = made.heads[str(layer - 1)](made.features[layer - 1])[:, :-1].detach()
            core = made.law.apply(said.reshape(-1, made.experts).numpy(), 2).experts.reshape(2, 8, 2)
            executed = seen[layer][0].reshape(2, 9, 2).numpy()
            for row in range(2):
                start = int(prompt[row]) + late
                assert np.array_equal(executed[row, start:], core[row, start - 1 :])
            assert differs.any()  # else nothing was tested
        else:
            assert not differs.any()


@pytest.mark.parametrize("first_token", ["gate", "heads"])
@pytest.mark.parametrize(("family", "k"), [("qwen3_moe", 1), ("qwen3_moe", 3), ("olmoe", 2), ("deepseek_v3", 2)])
def test_one_pass_gives_what_generation_gives_token_by_token(family, k, first_token):
    made = student(family, first_token, k)
    prompts = [[5, 7, 11, 13, 17], [3, 2, 70]]
    written = made.generate(prompts, 12, STOP, 0)
    batch = pad([Example(tuple(p), tuple(w)) for p, w in zip(prompts, written, strict=True)])
    with torch.no_grad():
        said = made(batch.ids, batch.prompt).argmax(-1)
    for row, (prompt, tokens) in enumerate(zip(prompts, written, strict=True)):
        assert said[row, len(prompt) - 1 : len(prompt) - 1 + len(tokens)].tolist() == tokens
    made.mode = "native"
    assert made.generate(prompts, 12, STOP, 0) != written  # predictions changed something


@pytest.mark.parametrize("first_token", ["gate", "heads"])
def test_a_batch_generates_what_each_prompt_does_alone(first_token):
    made = student(first_token=first_token)
    prompts = [[5, 7, 11, 13, 17], [3, 2, 70], [9, 1], [4], [23]]
    assert made.generate(prompts, 10, STOP, 0) == [made.generate([p], 10, STOP, 0)[0] for p in prompts]


def test_a_fresh_head_is_the_next_router_on_this_layers_input():
    torch.manual_seed(0)
    router, h = torch.randn(8, 64), torch.randn(5, 64)
    f = torch.cat([h, torch.randint(0, 2, (5, 16)).float()], -1)
    np.testing.assert_allclose(Head(router)(f).detach(), F.linear(h, router), rtol=1e-6)
    head = untrained(router.numpy())
    assert {part: m.shape for part, m in head.items()} == head_shapes(64, 8)
    inner = F.gelu(F.linear(f, torch.tensor(head["fc1"])))
    said = f.numpy() @ head["linear_init"].T + inner.numpy() @ head["fc2"].T
    np.testing.assert_allclose(said, F.linear(h, router), rtol=1e-4, atol=1e-4)


def test_parameters_of_the_papers_heads():
    assert head_parameters(2048, 256) == 2_097_152
    assert head_parameters(1536, 128) == 1_212_416


def test_adapters_off_is_the_base_and_fresh_ones_change_nothing():
    made = student()
    made.mode = "native"
    ids, prompt = torch.randint(0, 90, (1, 9)), torch.tensor([4])
    with torch.no_grad():
        adapted = made(ids, prompt)
        made.use_adapters(False)
        plain = made(ids, prompt)
        made.use_adapters(True)
        for adapter in made.adapters:
            adapter.b.zero_()
        fresh = made(ids, prompt)
    assert not torch.equal(adapted, plain)
    assert torch.equal(fresh, plain)


def test_training_sees_experts_as_they_are_stored():
    model = native_model("gpt_oss")  # stores its matrices transposed
    experts = model.get_submodule("model.layers.0.mlp.experts")
    before = experts.down_proj[3].detach().T.contiguous().numpy()
    biases = experts.down_proj_bias.clone()
    dequantise_experts(model, "int8")
    stored = dequantize(quantize("down_proj", before, QuantSpec("int8")))
    assert np.array_equal(experts.down_proj[3].T.detach().numpy(), stored)
    assert not np.array_equal(before, stored)
    assert torch.equal(experts.down_proj_bias, biases)


LOGITS = st.lists(st.floats(-8, 8, width=32), min_size=12, max_size=12).map(lambda v: torch.tensor(v).view(2, 6))


@settings(max_examples=40)
@given(said=LOGITS, true=LOGITS, k=st.integers(1, 5))
def test_reverse_kl_is_a_divergence_and_coarser_tells_less(said, true, k):
    said, true = said.double(), true.double()
    full = (said.softmax(-1) * (said.log_softmax(-1) - true.log_softmax(-1))).sum(-1)
    coarse = reverse_kl(said, true, k)
    assert (coarse >= -1e-12).all()
    assert (coarse <= full + 1e-12).all()
    torch.testing.assert_close(reverse_kl(said, true, 5), full, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(reverse_kl(true, true, k), torch.zeros(2).double(), rtol=0, atol=1e-12)


def test_the_experts_function_is_the_students_own():
    made = student()
    assert made.model.config._experts_implementation == EXPERTS
