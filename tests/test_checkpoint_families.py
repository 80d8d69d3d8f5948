"""Every expert and every dense tensor of a checkpoint's pack is transformers' own parameter, for all families."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from family_checkpoints import FAMILIES, make_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from moebench.backends.torch_experts import expert_modules, expert_parameters
from moebench.backends.torch_source import load_model
from moebench.checkpoint.open import open_source
from moebench.errors import MoebenchError
from moebench.store.engines import StoreError
from moebench.store.layout import QuantSpec
from moebench.store.pages import aligned_buffer
from moebench.store.plain import PlainLayout
from moebench.store.writer import write_pack


def packed(folder, out, quant="none"):
    """(pack, its dense tensors by name)."""
    pack = write_pack(out, open_source(folder), QuantSpec(quant), PlainLayout())
    return pack, load_file(pack.dense_path)


def parts(pack, layer, expert):
    buffer = aligned_buffer(pack.slot_bytes)
    pack.read(layer * pack.experts + expert, buffer)
    return pack.views(buffer)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_pack_holds_what_transformers_loads(family, tmp_path):
    folder = make_checkpoint(family, tmp_path / "model", tokenizer=False, shards=3)
    assert len(list(folder.glob("*.safetensors"))) > 1
    pack, dense = packed(folder, tmp_path / "pack")
    model = load_model(folder, "bfloat16")
    modules = list(expert_modules(model).values())
    assert (pack.layers, pack.experts) == (len(modules), modules[0].num_experts)
    for layer, module in enumerate(modules):
        for expert in range(pack.experts):
            found = parts(pack, layer, expert)
            assert set(found) == set(expert_parameters(module))
            for name, parameter in expert_parameters(module).items():
                wanted = parameter[expert].detach().bfloat16()
                wanted = wanted.T if module.is_transposed and wanted.dim() == 2 else wanted
                np.testing.assert_array_equal(
                    found[name], wanted.contiguous().view(torch.int16).numpy().view(np.uint16)
                )
    routed = {f"{m}.{p}" for m, module in expert_modules(model).items() for p in expert_parameters(module)}
    wanted = {n: t for n, t in model.state_dict().items() if n not in routed}
    distinct = {t.data_ptr(): n for n, t in reversed(wanted.items())}
    assert set(dense) == set(distinct.values())  # tied tensors stand there once
    for name, tensor in dense.items():
        assert torch.equal(tensor, wanted[name].to(tensor.dtype)), name
        assert tensor.dtype == wanted[name].dtype, name


@pytest.mark.parametrize("family", ["qwen3_moe", "granitemoe", "gpt_oss_mxfp4", "qwen3_moe_fp8"])
def test_shards_make_no_difference(family, tmp_path):
    hashes = set()
    for shards in (1, 4):
        folder = make_checkpoint(family, tmp_path / f"{shards}" / "model", tokenizer=False, shards=shards)
        pack, _ = packed(folder, tmp_path / f"{shards}" / "pack", "int4")
        hashes.add((pack.manifest.logical_hash, pack.manifest.dense_hash))
    assert len(hashes) == 1


def test_a_checkpoint_under_transformers_own_names_is_read_too(tmp_path):
    folder = make_checkpoint("olmoe", tmp_path / "hub", tokenizer=False)
    model, own = load_model(folder, "bfloat16"), tmp_path / "own"
    own.mkdir()
    save_file({n: t.contiguous() for n, t in model.state_dict().items()}, own / "model.safetensors")
    (own / "config.json").write_text((folder / "config.json").read_text())
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(own / "model.safetensors")
    hub, fused = (packed(f, tmp_path / f"{f.name}-pack")[0].manifest for f in (folder, own))
    assert (hub.logical_hash, hub.dense_hash) == (fused.logical_hash, fused.dense_hash)


def test_a_multimodal_checkpoint_gives_its_language_model_and_says_what_it_leaves_out(tmp_path, capsys):
    """Fused experts under ``model.language_model.``, beside a vision tower and prediction layers."""
    folder = make_checkpoint("qwen3_5_moe", tmp_path / "text", tokenizer=False)
    wanted, wanted_dense = packed(folder, tmp_path / "a")
    model, whole = load_model(folder, "bfloat16"), tmp_path / "whole"
    whole.mkdir()
    tensors = {n.replace("model.", "model.language_model.", 1): t.contiguous() for n, t in model.state_dict().items()}
    tensors["model.visual.blocks.0.attn.qkv.weight"] = torch.zeros(8, 4)
    tensors["mtp.fc.weight"] = torch.zeros(2, 2)
    save_file(tensors, whole / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    config = {"model_type": "qwen3_5_moe", "text_config": text, "architectures": ["Qwen3_5MoeForConditionalGeneration"]}
    (whole / "config.json").write_text(json.dumps(config))
    pack, dense = packed(whole, tmp_path / "b")
    assert pack.manifest.logical_hash == wanted.manifest.logical_hash
    assert dense.keys() == wanted_dense.keys()
    assert all(torch.equal(dense[name], wanted_dense[name]) for name in dense)
    said = capsys.readouterr().err
    assert "2 tensors are no part of this model and are left out" in said
    assert "model.visual" in said


def test_prediction_layers_behind_the_last_are_left_out(tmp_path, capsys):
    folder = make_checkpoint("deepseek_v3", tmp_path / "model", tokenizer=False)
    before, _ = packed(folder, tmp_path / "before")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.3.eh_proj.weight"] = torch.zeros(4, 4)
    save_file(tensors, folder / "model.safetensors")
    after, _ = packed(folder, tmp_path / "after")
    assert "1 tensors are no part" in capsys.readouterr().err
    assert after.manifest.logical_hash == before.manifest.logical_hash


def changed(tmp_path, change, family="mixtral", **config):
    """A checkpoint whose tensors went through ``change`` (a function of the mapping)."""
    folder = make_checkpoint(family, tmp_path / "model", tokenizer=False)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return folder


EXPERT = "model.layers.1.block_sparse_moe.experts.3.w2.weight"


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        (lambda t: t.pop("model.norm.weight"), "lacks 1 tensors: model.norm.weight"),
        (lambda t: t.pop(EXPERT), "needs 8 experts, the checkpoint has 7"),
        (lambda t: t.update({EXPERT.replace(".3.", ".9."): t.pop(EXPERT)}), "needs 8 experts"),
        (lambda t: [t.pop(n) for n in list(t) if ".w2." in n], "lacks 2 tensors of experts: .*0.mlp.experts.down_proj"),
        (lambda t: t.update({"model.layers.0.surprise": torch.zeros(2)}), "no place for model.layers.0.surprise"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(7)}), r"norm.weight is \[7\], .* says \[128\]"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(128, dtype=torch.float8_e4m3fn)}), "has no scale"),
    ],
)
def test_a_checkpoint_that_does_not_fit_its_configuration_is_one_line(change, hint, tmp_path):
    folder = changed(tmp_path, change)
    with pytest.raises(StoreError, match=hint) as caught:
        open_source(folder)
    assert "\n" not in str(caught.value)


def test_an_expert_of_another_shape_is_found_when_it_is_read(tmp_path):
    folder = changed(tmp_path, lambda t: t.update({EXPERT: torch.zeros(128, 32)}))
    with pytest.raises(StoreError, match=r"w2.weight makes an expert's down_proj \[128, 32\]"):
        packed(folder, tmp_path / "pack")


def test_tied_weights_that_differ_are_refused_and_equal_ones_stand_there_once(tmp_path):
    def copy(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    folder = changed(tmp_path / "a", copy, "qwen3_moe")
    assert "lm_head.weight" not in packed(folder, tmp_path / "pack")[1]

    def other(tensors):
        copy(tensors)
        tensors["lm_head.weight"][-1, -1] += 1

    with pytest.raises(StoreError, match="they differ; set tie_word_embeddings to false"):
        open_source(changed(tmp_path / "b", other, "qwen3_moe"))


def test_a_method_of_quantisation_that_is_not_decoded_is_refused(tmp_path):
    folder = changed(tmp_path, lambda t: None, quantization_config={"quant_method": "gptq"})
    with pytest.raises(StoreError, match="quantised by gptq, which is not read; valid: fp8, mxfp4"):
        open_source(folder)


def test_dense_weights_under_the_checkpoints_own_names_are_its_bytes(tmp_path):
    folder = make_checkpoint("qwen3_moe_fp8", tmp_path / "model", tokenizer=False, shards=2)
    source = open_source(folder, dense="checkpoint")
    assert source.write_dense(tmp_path / "dense.safetensors") == (tmp_path / "dense.safetensors").stat().st_size
    dense = load_file(tmp_path / "dense.safetensors")
    own = {n: t for f in folder.glob("*.safetensors") for n, t in load_file(f).items() if ".experts." not in n}
    assert dense.keys() == own.keys()
    assert "model.layers.0.self_attn.q_proj.weight_scale_inv" in dense
    assert all(torch.equal(dense[n].view(torch.uint8), own[n].view(torch.uint8)) for n in own)


ODD = [None, -1, 0, 1, 2, 3.5, 10**30, float("nan"), True, "", "x", "float16", [], [1], [None] * 3, {}, {"a": 1}]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """(folder, its configuration) of a small checkpoint with many settings."""
    folder = make_checkpoint("deepseek_v3", tmp_path_factory.mktemp("odd") / "model", tokenizer=False)
    return folder, json.loads((folder / "config.json").read_text())


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_any_configuration_is_a_source_or_one_line(small, data):
    folder, config = small
    keys = st.sampled_from([*sorted(config), "quantization_config", "quantization", "text_config", "vision_config"])
    changes = data.draw(st.dictionaries(keys, st.sampled_from(ODD), min_size=1, max_size=3))
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    try:
        open_source(folder)
    except (StoreError, MoebenchError) as error:
        line = str(error)
    else:
        line = ""
    assert "\n" not in line
    assert len(line) < 600
