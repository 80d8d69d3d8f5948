"""Shipped geometries: their formulas give the numbers that modeled rows rest on, what others published, and the
parameters of the real model class.
"""

from __future__ import annotations

import re

import pytest

from moebench import geometry, model_card
from moebench.arithmetic import evaluate
from moebench.cli import main
from moebench.errors import UsageError
from moebench.plugins import load_plugins

NAMES = sorted(load_plugins().models)
# What replays of committed results used: parameters beside experts and dense blocks, state per token, fixed state.
PINNED = {
    "deepseek-v2-lite": (794553856, 31104, 0),
    "deepseek-v4-flash": (6224709207, 6880, 5636096),
    "deepseek-vl2-tiny": (410533120, 61440, 0),
    "ernie-4.5-21b-a3b": (709738688, 57344, 0),
    "gemma-4-26b-a4b": (1859891200, 225280, 0),
    "glm-5.2": (15624835584, 109824, 0),
    "gpt-oss-120b": (2127557952, 73728, 0),
    "gpt-oss-20b": (1797824064, 49152, 0),
    "kimi-k2.7-code": (8683412480, 70272, 0),
    "lfm2-24b-a2b": (747724032, 20480, 368640),
    "ling-3.0-tiny-8b": (1015430684, 6912, 14155776),
    "mixtral-8x7b": (1605636096, 131072, 0),
    "olmoe-1b-7b": (476710912, 131072, 0),
    "qwen3-30b-a3b": (1541093376, 98304, 0),
    "qwen3.6-35b-a3b": (2322526848, 20480, 64389120),
}


def card(name: str) -> model_card.ModelCard:
    return model_card.load(load_plugins().model_path(name))


def test_replayed_numbers_do_not_move():
    shapes = {name: card(name).geometry for name in NAMES}
    found = {n: (s.other_parameters, s.kv_bytes_per_token, s.fixed_state_bytes) for n, s in shapes.items()}
    assert found == PINNED


@pytest.mark.parametrize("name", NAMES)
def test_published_figures_are_met_within_a_percent_or_the_reason_is_stated(name):
    entries = card(name).published
    assert any(entry.what.startswith(("all parameters", "parameters of")) for entry in entries)
    for entry in entries:
        assert abs(entry.gap) <= 0.01 or entry.why, f"{entry.what}: {entry.gap:+.2%}"
        assert abs(entry.gap) <= 0.12, entry.what
        assert entry.source


@pytest.mark.parametrize("name", [name for name in NAMES if card(name).config])
def test_the_real_class_has_the_same_parameters_and_experts(name):
    from moebench.backends.torch_experts import expert_modules, expert_parameters
    from moebench.backends.torch_source import empty_model

    known = card(name)
    model = empty_model(known.config, "bfloat16")
    modules = list(expert_modules(model).values())
    total = sum(parameter.numel() for parameter in model.parameters())
    biases = sum(p.numel() for m in modules for n, p in expert_parameters(m).items() if n.endswith("_bias"))
    assert total - biases == known.geometry.parameters
    assert (len(modules), modules[0].num_experts) == (known.geometry.layers, known.geometry.experts)
    assert {known.geometry.hidden, known.geometry.intermediate} <= set(modules[0].down_proj.shape)
    chosen = {known.config.get(key) for key in ("num_experts_per_tok", "top_k_experts", "moe_k")}
    assert known.geometry.top_k in chosen
    assert known.geometry.vocabulary == model.get_input_embeddings().weight.shape[0]


@pytest.mark.parametrize("name", NAMES)
def test_list_prints_every_term_with_a_formula_that_gives_its_number(name, capsys):
    assert main(["list", name]) == 0
    known, out = card(name), capsys.readouterr().out
    for part, count in known.parts.items():
        line = next(line.strip() for line in out.splitlines() if line.strip().startswith(part.replace("_", " ")))
        match = re.fullmatch(r"[a-z0-9 ]+?\s{2,}([\d,]+)\s+[\d.]+ \w+\s{2}(.+)", line)
        assert match, line
        assert int(match[1].replace(",", "")) == count
        assert int(evaluate(match[2], known.names)) == count
    for text in (
        "expert ",
        "met by a token",
        "FLOPs of a token",
        "kept for each token of context",
        "for each token before",
    ):
        assert text in out
    assert out.count("published, ") == len(known.published)


def test_a_changed_term_changes_the_sum():
    data = dict(card("qwen3-30b-a3b").data)
    data["parts"] = {**data["parts"], "routers": "2 * layers * experts * hidden"}
    changed = geometry.from_dict(data)
    assert changed.other_parameters - PINNED["qwen3-30b-a3b"][0] == 48 * 128 * 2048
    assert changed.active_parameters - card("qwen3-30b-a3b").geometry.active_parameters == 48 * 128 * 2048


@pytest.mark.parametrize(
    ("formula", "hint"),
    [
        ("__import__('os').getcwd()", "only numbers"),
        ("layers ** 99", "only numbers"),
        ("layer * 2", "unknown name 'layer'"),
        ("layers / 0", "cannot be computed"),
        ("1e999", "counts nothing"),
        ("layers - 1000", "counts nothing"),
        ("(" * 300, "cannot be computed"),
        (["layers"], "not a formula"),
        ("1 +" * 400, "not a formula"),
        ("True", "only numbers"),
    ],
)
def test_a_formula_is_arithmetic_and_nothing_else(formula, hint):
    data = {**card("mixtral-8x7b").data, "parts": {"all": formula}}
    with pytest.raises(UsageError, match=re.escape(hint)) as caught:
        geometry.from_dict(data, "here.yaml")
    assert str(caught.value).startswith("here.yaml: ")
    assert "\n" not in str(caught.value)


def test_parts_and_their_sum_are_not_both_given():
    data = {**card("mixtral-8x7b").data, "other_parameters": 1}
    with pytest.raises(UsageError, match="sum of parts"):
        geometry.from_dict(data)
