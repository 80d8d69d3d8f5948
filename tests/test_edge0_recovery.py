"""Merging a recovery adapter into quantised weights loses it when it is small; beside the weights nothing is lost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open

from moebench.models import tinymoe
from moebench.store.layout import QuantSpec
from moebench.store.quant import dequantize, from_bf16, quantize
from moebench.systems import edge0
from moebench.systems.edge0.artefact import load
from moebench.systems.edge0.recovery import kept_by_requantising

STEPS = (0.05, 0.2, 1.0, 5.0)  # the change's RMS in quantisation steps
SPECS = (QuantSpec("int4", 64), QuantSpec("int4", 32), QuantSpec("int8"))


@pytest.fixture(scope="module")
def projections():
    """tinymoe's attention projections of one layer, fp32."""
    with safe_open(Path(tinymoe.__file__).parent / "checkpoint" / "model.safetensors", "pt") as file:
        names = [f"model.layers.3.self_attn.{part}_proj.weight" for part in "qkvo"]
        return {name: file.get_tensor(name).float().numpy() for name in names}


def adapter(weight, spec, steps, rank=16):
    """(A, B, scale) whose product has an RMS of ``steps`` quantisation steps of ``weight``."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((rank, weight.shape[1])), rng.standard_normal((weight.shape[0], rank))
    step = np.sqrt((from_bf16(quantize("w", weight, spec).scale) ** 2).mean())
    return a, b, steps * step / np.sqrt(((b @ a) ** 2).mean())


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_on_the_served_weights_more_survives_of_a_larger_change(projections, spec):
    for weight in projections.values():
        served = dequantize(quantize("w", weight, spec))
        kept = [kept_by_requantising(served, *adapter(weight, spec, n), spec) for n in STEPS]
        assert [k.share for k in kept] == sorted(k.share for k in kept)
        assert kept[0].share < 0.05
        assert kept[0].strength < 0.2
        assert kept[0].error > 0.9  # as good as lost
        assert 0.1 < kept[1].share < 0.4
        assert 0.2 < kept[1].strength < 0.7
        assert 0.2 < kept[2].error < 0.4
        assert kept[3].share > 0.98
        assert kept[3].error < 0.15


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_between_the_steps_strength_stays_one_and_hides_the_noise(projections, spec):
    """Weights that were never quantised dither the rounding: strength alone would say that nothing is lost."""
    for weight in projections.values():
        kept = [kept_by_requantising(weight, *adapter(weight, spec, n), spec) for n in STEPS]
        assert all(abs(k.strength - 1) < 0.3 for k in kept)
        assert kept[0].error > 3
        assert [k.error for k in kept] == sorted((k.error for k in kept), reverse=True)
        assert [k.share for k in kept] == sorted(k.share for k in kept)
        assert kept[0].share < 0.1
        assert kept[3].share > 0.98


def test_beside_the_weights_nothing_is_lost(projections):
    """The branch's own rounding, against what merging leaves of the same change: outputs on random inputs."""
    spec = SPECS[0]
    for weight in projections.values():
        served = dequantize(quantize("w", weight, spec))
        a, b, scale = adapter(weight, spec, 0.2)
        x = np.random.default_rng(1).standard_normal((64, weight.shape[1]))
        meant = x @ (scale * (b @ a)).T
        merged = x @ (dequantize(quantize("w", served + scale * (b @ a), spec)) - served).T
        bf16 = [torch.tensor(m).bfloat16() for m in (x, a, b)]
        beside = (scale * F.linear(F.linear(bf16[0], bf16[1]), bf16[2])).double().numpy()

        def error(got, meant=meant):
            return np.linalg.norm(got - meant) / np.linalg.norm(meant)

        assert error(beside) < 0.01
        assert error(merged) > 0.5


def test_the_measures_on_a_grid_worked_out_by_hand():
    """int8 of one row with 127 as its largest weight: the step is 1 and stays 1."""
    weight = np.array([[127.0, 10.0, -20.0, 30.0]])
    a, b = np.array([[0.0, 1.0, 1.0, 0.25]]), np.array([[2.0]])
    whole = kept_by_requantising(weight, a * [[1, 1, 1, 0]], b, 0.5, QuantSpec("int8"))
    assert (whole.share, whole.strength, whole.error) == (1.0, 1.0, 0.0)
    lost = kept_by_requantising(weight, a, b, 0.2, QuantSpec("int8"))
    assert (lost.share, lost.strength, lost.error) == (0.0, 0.0, 1.0)
    part = kept_by_requantising(weight, a, b, 0.5, QuantSpec("int8"))  # 1, 1 and 0.25 were meant, 1, 1 and 0 come
    assert part.strength == pytest.approx(2 / 2.0625)
    assert part.share == pytest.approx(4 / (2 * 2.0625))
    assert part.error == pytest.approx((0.0625 / 2.0625) ** 0.5)


def test_what_merging_would_keep_of_the_shipped_adapters():
    """Trained changes of about a quantisation step: most survives merging, not all, and beside the weights all does."""
    spec = SPECS[0]
    shipped = load(Path(edge0.__file__).parent / "artefacts" / "tinymoe-k2").adapters
    with safe_open(Path(tinymoe.__file__).parent / "checkpoint" / "model.safetensors", "pt") as file:
        for name, (a, b) in shipped.pairs.items():
            weight = file.get_tensor(f"{name}.weight").float().numpy()
            served = dequantize(quantize("w", weight, spec))
            kept = kept_by_requantising(served, a, b, shipped.scale, spec)
            assert 0.5 < kept.share < 0.97
            assert 0.15 < kept.error < 0.9
