"""Row-invariant numerics: windows, chunks and batches give the bits of single steps; forgetting leaves no trace."""

from __future__ import annotations

import numpy as np
import pytest
from torch_models import DictServer, make_backend, make_pack, native_model, run

from moebench.backends.torch_bytes import TorchCpuLayout
from moebench.backends.torch_experts import BackendError
from moebench.backends.torch_model import NativeTorchBackend, TorchBackend
from moebench.backends.torch_source import folder_hash, load_model
from moebench.checkpoint.open import open_source
from moebench.engine.loop import Loop
from moebench.store.layout import QuantSpec
from moebench.store.writer import write_pack

TOKENS = np.random.default_rng(0).integers(0, 96, (3, 24))


@pytest.fixture(scope="module", params=["none", "int8", "int4"])
def bf16(request, tmp_path_factory):
    """(row-invariant bf16 backend, server) of a small Qwen3-MoE per quantisation."""
    quant = QuantSpec(request.param, 32)
    pack = make_pack(tmp_path_factory.mktemp("p"), native_model("qwen3_moe"), quant, dtype="bfloat16")
    return make_backend(pack, dtype="bfloat16", numerics="row_invariant"), DictServer(pack)


def steps(backend, server, tokens, cuts):
    """All logits [B, W, V] of ``tokens`` [B, W] fed in pieces that end at ``cuts``."""
    backend.reset(len(tokens))
    pieces, first = [], 0
    for last in cuts:
        piece = run(backend, server, tokens[:, first:last], past=[first] * len(tokens), all_rows=True)
        pieces.append(piece.reshape(len(tokens), last - first, -1))
        first = last
    return np.concatenate(pieces, axis=1)


@pytest.mark.parametrize("cuts", [[24], [16, 20, 24], [5, 6, 13, 24]])
def test_windows_and_chunks_equal_single_steps(bf16, cuts):
    backend, server = bf16
    single = steps(backend, server, TOKENS[:1], range(1, 25))
    assert np.array_equal(steps(backend, server, TOKENS[:1], cuts), single)


def test_batch_of_equal_lengths_equals_each_alone(bf16):
    backend, server = bf16
    together = steps(backend, server, TOKENS, [20, 21, 22, 24])
    for i in range(3):
        assert np.array_equal(together[i], steps(backend, server, TOKENS[i : i + 1], [20, 21, 22, 24])[0])


def test_left_padded_batch_follows_each_alone(bf16):
    """Padding in front moves the terms of attention's sums, so last bits may differ; equal lengths are exact."""
    backend, server = bf16
    lengths = [8, 5, 3]
    valid = np.arange(8) >= 8 - np.array(lengths)[:, None]
    padded = np.zeros((3, 8), np.int64)
    for i, length in enumerate(lengths):
        padded[i, 8 - length :] = TOKENS[i, :length]
    backend.reset(3)
    together = [run(backend, server, padded, valid=valid)]
    for n in range(3):
        past = [length + n for length in lengths]
        together.append(run(backend, server, TOKENS[:, 10 + n : 11 + n], past=past))
    for i, length in enumerate(lengths):
        own = np.concatenate([TOKENS[i, :length], TOKENS[i, 10:13]])[None]
        alone = steps(backend, server, own, [length, length + 1, length + 2, length + 3])[0, length - 1 :]
        got = np.stack([logits[i] for logits in together])
        np.testing.assert_allclose(got, alone, atol=0.03 * np.abs(alone).max())


def test_last_row_logits_are_the_last_of_all_rows(bf16):
    backend, server = bf16
    backend.reset(2)
    last = run(backend, server, TOKENS[:2, :7])
    assert last.dtype == np.float32
    assert np.array_equal(last, steps(backend, server, TOKENS[:2, :7], [7])[:, -1])


def test_forgetting_tokens_leaves_no_trace(bf16):
    backend, server = bf16
    expected = steps(backend, server, TOKENS[:1], [10, 11])[:, 10]
    backend.reset(1)
    run(backend, server, TOKENS[:1, :10])
    held = backend.kv_bytes()
    run(backend, server, TOKENS[1:2, :4], past=[10])
    assert backend.kv_bytes() == held * 14 // 10
    backend.retain(np.zeros((1, 4), bool))
    assert (backend.length, backend.kv_bytes()) == (10, held)
    assert np.array_equal(run(backend, server, TOKENS[:1, 10:11], past=[10]), expected[0][None])


def test_padding_would_shift_a_sliding_window(tmp_path):
    pack = make_pack(tmp_path, native_model("gpt_oss"))
    backend, server = make_backend(pack), DictServer(pack)
    run(backend, server, TOKENS[:1, :12])
    with pytest.raises(BackendError, match="between a sequence's tokens would shift a sliding attention window"):
        run(backend, server, TOKENS[:1, :2], valid=[[False, True]], past=[12])


def test_short_prompts_wait_for_long_ones_beside_a_sliding_window():
    """Padding in front of several passes, and behind an answer that ended, moves nobody's window."""
    loop = Loop(NativeTorchBackend(native_model("gpt_oss")), None, 4)
    prompts = [list(map(int, TOKENS[0, :3])), list(map(int, TOKENS[1, :20]))]

    alone = [loop.generate([prompt], 12).tokens[0] for prompt in prompts]
    assert loop.generate(prompts, 12).tokens == alone
    ended = loop.generate(prompts, 12, stop=lambda ids: ids == alone[0][:3])
    assert ended.tokens == [alone[0][:3], alone[1]]


def test_folder_native_backend_and_pack_agree(tmp_path):
    """A saved folder: the source packs it, the native backend runs it; both see one model."""
    folder = tmp_path / "tiny"
    native_model("qwen3_moe").save_pretrained(folder)
    source = open_source(folder)
    assert source.model["name"] == "tiny"
    assert source.model["weights_hash"] == folder_hash(folder) == open_source(folder).model["weights_hash"]
    pack = write_pack(tmp_path / "pack", source, QuantSpec("none"), TorchCpuLayout())
    ours, native = make_backend(pack, dtype="bfloat16"), NativeTorchBackend(folder)
    expected = steps(native, None, TOKENS[:2], [20, 21])
    got = steps(ours, DictServer(pack), TOKENS[:2], [20, 21])
    np.testing.assert_allclose(got, expected, atol=0.05 * np.abs(expected).max())
    assert (got.argmax(-1) == expected.argmax(-1)).mean() > 0.9
    assert native.dense_bytes > ours.dense_bytes
    assert set(native.probe_row_invariance()) < set(ours.probe_row_invariance())


def test_failures_name_what_is_wrong(tmp_path):
    with pytest.raises(BackendError, match=r"has no config\.json"):
        load_model(tmp_path / "none", "bfloat16")
    pack = make_pack(tmp_path, native_model("qwen3_moe"), QuantSpec("int4", 32), dtype="bfloat16")
    config = pack.manifest.model["config"]
    with pytest.raises(BackendError, match="flash' is not one of eager, sdpa"):
        make_backend(pack, attention="flash")
    with pytest.raises(BackendError, match="float16' is not one of bfloat16, float32"):
        make_backend(pack, dtype="float16")
    with pytest.raises(BackendError, match="model type 'nothing'"):
        TorchBackend(pack, pack.dense_path, {**config, "model_type": "nothing"})
    layers = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    with pytest.raises(BackendError, match=r"no values for model\.layers\.2"):
        TorchBackend(pack, pack.dense_path, {**config, **layers})
    object.__setattr__(pack.manifest, "isa", "Z80")
    with pytest.raises(BackendError, match="int4 bytes are for Z80"):
        make_backend(pack)
    object.__setattr__(pack.manifest, "byte_layout", "mlx")
    with pytest.raises(BackendError, match="byte layout is mlx"):
        make_backend(pack)
