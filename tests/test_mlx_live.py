"""Whole runs with backend=mlx: exact systems give the answers of everything resident, fitted artefacts serve, the row
says what computed it, and what cannot be is one line.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

pytest.importorskip("mlx_lm")

import mlx.core as mx
from harness_fixtures import LIVE, make_host
from mlx_models import MlxServer, make_backend, make_pack
from torch_models import run

import moebench
from moebench.backends.base import Adapters, BackendError
from moebench.backends.mlx_draft import MlxDrafter
from moebench.backends.mlx_ops import MlxOps
from moebench.backends.torch_draft import TorchDrafter
from moebench.backends.torch_ops import TorchOps
from moebench.cli import main
from moebench.commands import doctor
from moebench.engine.loop import Loop
from moebench.errors import UsageError
from moebench.geometry import embedded_folder
from moebench.harness import cell as cells
from moebench.trace.format import load

DRAFT = embedded_folder().parent / "draft"
MLX = {**LIVE, "backend": "mlx", "hw": "m4pro", "numerics": "row_invariant"}
EXACT = ("lru", "ondemand", "flashmoe", "moe_infinity", "specprefetch", "ssd_llama", "bigmomo", "mmap")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """One home for all runs, so that the model is packed once."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("home")
        patch.setenv("MOEBENCH_HOME", str(folder))
        patch.setenv("MOEBENCH_PLUGINS", "")
        patch.chdir(folder)
        yield folder


@pytest.fixture(scope="module")
def answers(home):
    """Answers (tokens and logits of each) and row of a run, by its options."""
    made = {}

    def of(**options):
        key = json.dumps(options, sort_keys=True)
        if key not in made:
            kept, generate, opened, open_backend = [], Loop.generate, [], cells.open_backend

            def keep(self, *args, **kwargs):
                kept.append(generate(self, *args, **kwargs, keep_logits=True))
                return kept[-1]

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Loop, "generate", keep)
                patch.setattr(cells, "open_backend", lambda *args: opened.append(open_backend(*args)) or opened[0])
                (row,) = moebench.run(**{**MLX, **options})
            assert row.status == "ok", row.error
            copied = [a.views.copied for a in getattr(opened[0], "_arithmetic", {}).values()]
            assert not any(copied)  # experts were computed on where they had been read to
            made[key] = ([g.tokens for g in kept], [np.stack(g.logits) for g in kept], row)
        return made[key]

    return of


@pytest.mark.parametrize("system", EXACT)
def test_exact_systems_answer_as_everything_resident_does(answers, system):
    tokens, logits, row = answers(system=system)
    expected, reference, _ = answers(system="resident")
    assert tokens == expected
    for one, two in zip(logits, reference, strict=True):
        assert np.array_equal(one, two)
    assert row.fidelity in ("exact", "advisory")


def test_the_row_says_what_computed_it(answers):
    _, _, row = answers(system="lru")
    assert row.config["backend"] == "mlx"
    device = mx.default_device().type.name
    assert any(line.startswith(f"computed with mlx on {device}, activations in") for line in row.assumptions)
    assert not any("computed with" in line for line in answers(system="lru", backend="torch")[2].assumptions)


def test_answers_are_those_of_torch_up_to_rounding(answers):
    ours, theirs = answers(system="resident", quant="none"), answers(system="resident", quant="none", backend="torch")
    for one, two in zip(ours[1], theirs[1], strict=True):
        assert np.abs(one[0] - two[0]).max() < 0.25  # torch computes in bf16
    assert ours[0][0][0][:2] == theirs[0][0][0][:2]


def test_edge0s_own_heads_and_adapters_serve(answers):
    _, ours, row = answers(system="edge0")
    _, theirs, torch_row = answers(system="edge0", backend="torch")
    assert np.abs(ours[0][0] - theirs[0][0]).max() < 0.5  # of logits that reach 9; torch computes in bf16
    assert row.protocol["equipment"] == torch_row.protocol["equipment"] != {}
    counters = row.protocol["counters"]
    assert counters["predicted_layers"] == torch_row.protocol["counters"]["predicted_layers"] > 0


def test_a_measured_run_tells_its_allocators_peak(home):
    make_host(home)
    (row,) = moebench.run(**{**MLX, "hw": "host"}, system="lru")
    assert row.status == "ok", row.error
    assert row.protocol["clock"] == "wall"
    peak, active = (row.metrics[name] for name in ("allocator_peak_gib", "peak_active_gib"))
    assert peak.provenance == "measured"
    assert peak.value > 0.5 * active.value  # experts and dense weights lie in memory of its own


def test_quality_is_asked(home):
    text = home / "text.jsonl"
    text.write_text(json.dumps({"prompt": "Q: 2+2=", "completion": "4 and some more words"}) + "\n")
    quality = {"suite": "quick", "limit": 1, "text": str(text)}
    (row,) = moebench.run(**{**MLX, "quality": quality}, system="lru", quant="none")
    assert row.status == "ok", row.error
    assert row.metrics["token_agreement"].value > 0.8
    assert row.metrics["kl_median_nats"].value < 0.01


def test_a_trace_is_recorded(home, capsys):
    out = home / "own.safetensors"
    words = ["trace", "record", f"out={out}", "backend=mlx", "requests=1", "new_tokens=4", "quant=none"]
    assert main(words) == 0
    assert main([*words[:2], f"out={home / 'torch.safetensors'}", *words[4:]]) == 0
    ours, theirs = load(out), load(home / "torch.safetensors")
    prompt = ours.phase == 0
    same = np.sort(ours.experts[prompt], -1) == np.sort(theirs.experts[theirs.phase == 0], -1)
    assert same.mean() > 0.95
    assert (np.diff(ours.weights, axis=-1) <= 0).all()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"model": "qwen3-30b-a3b", "quality": "none"}, "a replay computes nothing"),
        ({"backend": "jax"}, "torch"),
    ],
)
def test_what_cannot_be_is_one_line(home, options, line):
    with pytest.raises(UsageError, match=line):
        moebench.run(**{**MLX, **options}, system="lru")


def test_doctor_says_which_device_mlx_has(monkeypatch):
    found = doctor._mlx()
    assert found.ok
    assert f" on {mx.default_device().type.name}, mlx-lm " in found.found
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = doctor._mlx()
    assert not found.ok
    assert "moebench[mlx]" in found.without


def test_without_the_library_the_line_says_what_to_install(home, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlx_lm", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    with pytest.raises(UsageError, match=r"pip install 'moebench\[mlx\]'"):
        moebench.run(**MLX, system="lru")


def test_predictions_have_the_numbers_of_torchs_arithmetic_and_rows_of_their_own():
    ours, theirs = MlxOps(), TorchOps()
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((3, 9, 40)), rng.standard_normal((3, 17, 40)).astype(np.float16)

    def head(ops, x):
        product = ops.linear(ops.tensor(x), ops.tensor(w))
        return ops.numpy(ops.gelu(ops.concat([product, ops.stack([product[0]] * 3)])))

    np.testing.assert_allclose(head(ours, x), head(theirs, x), atol=1e-5)
    alone = np.concatenate([ours.numpy(ours.linear(ours.tensor(x[:, i : i + 1]), ours.tensor(w))) for i in range(9)], 1)
    assert np.array_equal(ours.numpy(ours.linear(ours.tensor(x), ours.tensor(w))), alone)
    hidden = mx.array(x[0]).astype(mx.bfloat16)
    rows = ours.rows(hidden, np.array([8, 0]))
    assert rows.dtype == mx.float32
    assert np.array_equal(ours.numpy(rows), ours.numpy(hidden)[[8, 0]])
    with pytest.raises(IndexError):
        ours.rows(hidden, np.array([9]))


def test_the_drafter_guesses_as_torchs_does():
    ours, theirs = MlxDrafter(DRAFT, 384), TorchDrafter(DRAFT, "float32", 384)
    rng = np.random.default_rng(1)
    text = rng.integers(3, 300, 20)
    for drafter in (ours, theirs):
        drafter.reset(2)
    for tokens in (text[:9], text[:12], text[:12], text[5:], text[:15]):
        one, two = ours.propose(tokens, 3, 2), theirs.propose(tokens, 3, 2)
        assert one.tokens.tolist() == two.tokens.tolist()
        assert one.parents.tolist() == two.parents.tolist()
        np.testing.assert_allclose(one.probability, two.probability, atol=1e-5)
    for number in ("vocabulary", "bytes_per_level", "held_bytes", "kv_bytes_per_token"):
        assert getattr(ours, number) == getattr(theirs, number), number
    with pytest.raises(BackendError, match=r"no config\.json"):
        MlxDrafter(DRAFT.parent, 384)


def test_probing_adapters_and_loading_a_drafter_are_in_no_runs_peak(tmp_path):
    backend = make_backend(embedded_folder(), make_pack(embedded_folder(), tmp_path / "pack"), "row_invariant")
    a, b = np.ones((4, 128), np.float16), np.ones((128, 4), np.float16)
    backend.adapt(Adapters(0.5, {"model.layers.0.self_attn.q_proj": (a, b)}))
    assert backend.allocator_peak_bytes() == 0  # nothing was asked for since
    assert backend.drafter(DRAFT).held_bytes > 0
    assert backend.allocator_peak_bytes() == 0


def test_adapters_stand_beside_their_projections_and_leave_without_trace(tmp_path):
    folder = embedded_folder()
    pack = make_pack(folder, tmp_path / "pack")
    backend = make_backend(folder, pack)
    server = MlxServer(backend, pack)

    def logits():
        backend.reset(1)
        return run(backend, server, [[5, 9, 20, 31]], all_rows=True)

    plain, held = logits(), backend.dense_bytes
    path = "model.layers.0.self_attn.q_proj"
    a, b = (np.random.default_rng(i).standard_normal(s).astype(np.float16) for i, s in enumerate(((4, 128), (128, 4))))
    backend.adapt(Adapters(0.5, {path: (a, b)}))
    adapted = logits()
    assert np.abs(adapted - plain).max() > 1e-3
    assert backend.dense_bytes == held
    parent = backend.model.model.layers[0].self_attn.inner
    kept = parent.q_proj.inner.weight
    backend.adapt(None)
    assert np.array_equal(logits(), plain)
    merged = kept + 0.5 * mx.array(b.astype(np.float32)) @ mx.array(a.astype(np.float32))
    parent.q_proj.weight = merged
    np.testing.assert_allclose(logits(), adapted, atol=1e-4)
    parent.q_proj.weight = kept
    for name, pair, line in (
        ("model.layers.0.mlp.gate", (a, b), "beside no dense projection"),
        (path, (a[:, :9], b), "do not fit"),
        (path, (a * np.inf, b), "not finite"),
    ):
        with pytest.raises(BackendError, match=line):
            backend.adapt(Adapters(1.0, {name: pair}))
    assert np.array_equal(logits(), plain)
