"""What makes rows independent of each other, in float32, where every last bit shows: attention row by row, states step
by step, routers row by row and best first.
"""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F
from family_checkpoints import native
from transformers import DynamicCache

from moebench.backends.probe import plain_kernels
from moebench.backends.torch_experts import BackendError, expert_modules
from moebench.backends.torch_geometry import attention_modules, head_shape
from moebench.backends.torch_routers import outer_router, settle_routers
from moebench.backends.torch_settled import Settled
from moebench.backends.torch_state import Memory, cache_argument
from moebench.backends.torch_window import always_apart, attend_paths, short_context

ROWS = 24


@pytest.fixture(autouse=True)
def plain():
    with torch.inference_mode(), plain_kernels(True):
        yield


@pytest.mark.parametrize("past", [0, 5, 40])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_rows_that_attend_by_themselves_have_the_bits_of_steps(family, past):
    """With a sliding window, a sink, values of another size than keys; the family's own call of many rows has not."""
    model, random = native(family, "float32"), torch.Generator().manual_seed(0)
    assert always_apart(model) == (family == "gpt_oss")
    for module in attention_modules(model)[:2]:
        heads, kv_heads, key_size, value_size = head_shape(module)
        seen = getattr(module, "sliding_window", None) or past + ROWS
        shapes = ((heads, ROWS, key_size), (kv_heads, past + ROWS, key_size), (kv_heads, past + ROWS, value_size))
        q, k, v = (torch.randn(2, *shape, generator=random) for shape in shapes)
        eager = sys.modules[type(module).__module__].eager_attention_forward
        steps = []
        for row in range(ROWS):
            own = slice(max(0, past + row + 1 - seen), past + row + 1)
            steps.append(eager(module, q[:, :, row : row + 1], k[:, :, own], v[:, :, own], None, scaling=0.2)[0])
        steps = torch.cat(steps, 1)
        first = max(0, past + 1 - seen)
        low = torch.finfo(torch.float32).min
        mask = torch.full((ROWS, past + ROWS), low).triu(past + 1)
        mask += torch.full_like(mask, low).tril(past - seen)
        given = (module, q, k[:, :, first:], v[:, :, first:], mask[None, None, :, first:].expand(2, 1, -1, -1))
        assert torch.equal(attend_paths(*given, scaling=0.2)[0], steps)
        together = eager(*given, scaling=0.2)[0]
        assert not torch.equal(together, steps)
        torch.testing.assert_close(together, steps)
        split = attend_paths(*given, short_context(model), scaling=0.2)[0]
        torch.testing.assert_close(split, steps)
        apart = max(0, short_context(model) - past - 1) if seen > past + ROWS - 1 else 0
        assert torch.equal(split[:, :apart], steps[:, :apart])


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe", "bailing_hybrid", "lfm2_moe"])
def test_states_are_those_of_steps_where_layers_run_step_by_step(family):
    outputs = {}
    for stepwise in (True, False):
        model = native(family, "float32")
        memory = Memory(model, cache_argument(model), stepwise)
        module, random = next(iter(memory.modules.values())), torch.Generator().manual_seed(0)
        x = torch.randn(2, 20, 128, generator=random)

        def run(x, *ends, model=model, module=module):
            cache = DynamicCache(config=model.config)
            cuts = zip((0, *ends), ends, strict=False)
            return torch.cat([module(x[:, a:b], **{cache_argument(model): cache}) for a, b in cuts], 1)

        outputs[stepwise] = run(x, 20), run(x, 9, 10, 16, 20), run(x, *range(1, 21))
    assert torch.equal(outputs[True][0], outputs[True][2])
    assert torch.equal(outputs[True][1], outputs[True][2])
    torch.testing.assert_close(outputs[False][0], outputs[True][0])  # the family's own way is as good, to rounding
    assert not torch.equal(outputs[False][0], outputs[False][2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padding", [0, 3])
def test_a_convolution_by_taps_is_torchs_and_the_same_for_many_sequences(dtype, padding):
    x, weight, bias = torch.randn(20, 96, 9).to(dtype), torch.randn(96, 1, 4).to(dtype), torch.randn(96).to(dtype)
    with Settled():
        together = F.conv1d(x, weight, bias, padding=padding, groups=96)
        assert torch.equal(together, torch.cat([F.conv1d(one, weight, bias, 1, padding, 1, 96) for one in x.split(1)]))
    torch.testing.assert_close(together, F.conv1d(x, weight, bias, padding=padding, groups=96))
    with Settled(), pytest.raises(BackendError, match="single channels only"):
        F.conv1d(x, torch.randn(8, 96, 4).to(dtype))


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "minimax_m2", "hunyuan_v1_moe", "qwen3_moe"])
def test_settled_routers_choose_as_before_best_first_and_row_by_row(family):
    def said(exact=None):
        model = native(family, num_experts_per_tok=4, **({"moe_topk": 4} if family == "hunyuan_v1_moe" else {}))
        if exact is not None:
            settle_routers(model, exact)
        router = outer_router(model, next(iter(expert_modules(model))))
        bias = {"e_score_correction_bias": torch.linspace(-0.2, 0.2, 8)} if family == "minimax_m2" else {}
        x = torch.randn(60, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
        return router(x, **bias), [router(row, **bias) for row in x.split(1)]

    (logits, weights, ids), _ = said()
    (_, best_weights, best_ids), _ = said(False)
    order, best = ids.argsort(-1), best_ids.argsort(-1)
    assert torch.equal(ids.gather(1, order), best_ids.gather(1, best))
    torch.testing.assert_close(weights.gather(1, order), best_weights.gather(1, best))
    if family in ("deepseek_v2", "hunyuan_v1_moe", "qwen3_moe"):  # no bias between weights and choice
        assert (best_weights.diff(dim=1) <= 0).all()
    together, alone = said(True)
    for part, rows in zip(together, zip(*alone, strict=True), strict=True):
        assert torch.equal(part, torch.cat(rows))
    torch.testing.assert_close(together[0], logits)
