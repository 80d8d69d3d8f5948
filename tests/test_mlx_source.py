"""Checkpoints that mlx-lm wrote: experts are what mlx dequantises, bytes are the file's own, nothing is requantised."""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

from mlx_checkpoints import arrays, dequantised, mlx_folder  # noqa: E402

from moebench.backends.torch_bytes import TorchCpuLayout  # noqa: E402
from moebench.checkpoint.files import Checkpoint  # noqa: E402
from moebench.checkpoint.mlx_stacks import Stacks  # noqa: E402
from moebench.checkpoint.open import open_source  # noqa: E402
from moebench.errors import UsageError  # noqa: E402
from moebench.store.engines import StoreError  # noqa: E402
from moebench.store.layout import LayoutError, QuantSpec  # noqa: E402
from moebench.store.mlx_bytes import MlxLayout  # noqa: E402
from moebench.store.pages import aligned_buffer  # noqa: E402
from moebench.store.quant import dequantize, from_bf16, quantize  # noqa: E402
from moebench.store.writer import write_pack  # noqa: E402

STORED, INT4 = QuantSpec("stored"), QuantSpec("int4")


def mixed(path: str, _: object) -> object:
    """Routers in 8 bits, down projections of experts in 6, embeddings as they are, the rest by the default."""
    if path.endswith((".mlp.gate", ".router", "shared_expert_gate")):
        return {"group_size": 32, "bits": 8}
    if "switch_mlp.down_proj" in path or "experts.down_proj" in path:
        return {"group_size": 32, "bits": 6}
    return "embed" not in path


def by_layer(path: str, _: object) -> object:
    """Experts of layer 1 in 6 bits, up projections everywhere in 3."""
    if "switch_mlp" in path:
        bits = 3 if "up_proj" in path else 6 if ".layers.1." in path else 4
        return {"group_size": 64, "bits": bits}
    return True


CASES = {
    "qwen3_moe": ({"bits": 4}, None),
    "qwen2_moe": ({"bits": 4, "group_size": 32}, None),
    "mixtral": ({"bits": 4, "group_size": 32}, mixed),
    "olmoe": ({"bits": 3}, None),
    "deepseek_v3": ({"bits": 5, "group_size": 32}, mixed),
    "qwen3_next": ({"bits": 4, "group_size": 64}, None),
    "qwen3_5_moe": ({"bits": 8}, None),
    "gpt_oss_mxfp4": ({"bits": 4, "group_size": 64}, None),  # its experts are mxfp4 before it is quantised
    "granitemoe": ({"bits": 2}, mixed),
    "lfm2_moe": ({"bits": 4}, by_layer),
    "phimoe": ({"bits": 8, "group_size": 32, "mode": "mxfp8"}, None),
    "glm4_moe": ({"bits": 4, "group_size": 16, "mode": "nvfp4"}, None),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Quantised folders by family, made once."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            quant, predicate = CASES[family]
            made[family] = mlx_folder(family, tmp_path_factory.mktemp(family), quant, predicate)
        return made[family]

    return get


def expected(folder: Path, tensors, path: str, expert: int, name: str) -> np.ndarray:
    """What mlx makes of one expert's matrix or vector, in transformers' order of rows."""
    config = json.loads((folder / "config.json").read_text())
    parts = ("gate_proj", "up_proj") if name.startswith("gate_up") else ("down_proj",)
    if name.endswith("_bias"):
        halves = [np.array(tensors[f"{path}.{part}.bias"][expert].astype(mx.float32)) for part in parts]
    else:
        halves = [np.array(dequantised(tensors, config, f"{path}.{part}")[expert]) for part in parts]
    if len(halves) == 1:
        return halves[0]
    if config["model_type"] == "gpt_oss":
        return np.stack(halves, axis=1).reshape(-1, *halves[0].shape[1:])
    return np.concatenate(halves)


def same_experts(one, other) -> bool:
    """Whether two packs hold the same bytes for every expert."""
    return one.manifest.hashes == other.manifest.hashes and one.manifest.tensors == other.manifest.tensors


@pytest.mark.parametrize("family", CASES)
def test_experts_are_what_mlx_dequantises(family, folders):
    folder = folders(family)
    source, tensors, stacks = open_source(folder, dense="checkpoint"), arrays(folder), Stacks(Checkpoint(folder))
    assert source.layers == len(stacks.paths)
    for layer, path in enumerate(stacks.paths):
        for expert in (0, source.experts - 1):
            found = source.expert(layer, expert)
            assert {"gate_up_proj", "down_proj"} <= set(found)
            for name, tensor in found.items():
                np.testing.assert_array_equal(dequantize(tensor), expected(folder, tensors, path, expert, name))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "qwen3_next", "phimoe", "glm4_moe"])
def test_an_mlx_pack_holds_the_files_own_bytes(family, folders, tmp_path):
    folder = folders(family)
    source, tensors = open_source(folder, dense="checkpoint"), arrays(folder)
    pack = write_pack(tmp_path / "pack", source, STORED, MlxLayout())
    paths, buffer = Stacks(Checkpoint(folder)).paths, aligned_buffer(pack.slot_bytes)
    for layer, path in enumerate(paths):
        pack.read(layer * pack.experts + 1, buffer)
        for name, view in pack.views(buffer).items():
            matrix, _, part = name.partition(".")
            parts = ("gate_proj", "up_proj") if matrix == "gate_up_proj" else ("down_proj",)
            own = [tensors[f"{path}.{p}.{part or 'weight'}"][1] for p in parts]
            assert view.tobytes() == b"".join(np.array(a.view(mx.uint8)).tobytes() for a in own)
    dense = arrays(pack.path)
    routed = tuple(f"{path}.{part}_proj" for path in paths for part in ("gate", "up", "down"))
    assert set(dense) == {name for name in tensors if not name.startswith(routed)}
    assert all(mx.array_equal(dense[n].view(mx.uint8), tensors[n].view(mx.uint8)) for n in dense)


def test_packs_in_both_bytes_have_one_logical_hash_and_int4_is_stored(folders, tmp_path):
    folder = folders("qwen3_moe")
    packs = {
        (quant.kind, layout.name): write_pack(
            tmp_path / f"{quant.kind}-{layout.name}",
            open_source(folder, dense="checkpoint" if layout.name == "mlx" else "transformers"), quant, layout,
        )
        for quant in (STORED, INT4) for layout in (MlxLayout(), TorchCpuLayout())
    }  # fmt: skip
    assert len({pack.manifest.logical_hash for pack in packs.values()}) == 1
    assert {pack.manifest.quant for pack in packs.values()} == {INT4}
    for name in ("mlx", "torch_cpu"):
        assert same_experts(packs["stored", name], packs["int4", name])


def test_bits_that_differ_are_widened_without_a_change(folders, tmp_path, capsys):
    folder = folders("lfm2_moe")
    source = open_source(folder, dense="checkpoint")
    assert "bits of experts differ in gate_up_proj and down_proj" in capsys.readouterr().err
    pack = write_pack(tmp_path / "pack", source, STORED, MlxLayout())
    assert {weight.kind for weight in pack.manifest.weights} == {"affine6"}


def test_one_expert_reads_its_own_rows_alone(folders, monkeypatch):
    checkpoint = Checkpoint(folders("qwen3_moe"))
    stacks, whole, read = Stacks(checkpoint), Checkpoint.read, []

    def counted(self, name, start=0, stop=None):
        data = whole(self, name, start, stop)
        read.append((name, data.nbytes))
        return data

    monkeypatch.setattr(Checkpoint, "read", counted)
    stacks.expert(1, 3)
    assert sorted(name for name, _ in read) == sorted(n for n in stacks.names if n.startswith(stacks.paths[1]))
    assert all(nbytes * stacks.experts == checkpoint.tensors[name].nbytes for name, nbytes in read)


def test_other_quantisations_of_a_quantised_folder_are_refused(folders, tmp_path):
    for quant in (QuantSpec("int8"), QuantSpec("none"), QuantSpec("int4", 32)):
        with pytest.raises(UsageError, match="quantised already, int4 in groups of 64; keep it so with quant=stored"):
            write_pack(tmp_path / "pack", open_source(folders("qwen3_moe"), dense="checkpoint"), quant, MlxLayout())
    with pytest.raises(UsageError, match="quantised already, in a way of its own"):
        write_pack(tmp_path / "pack", open_source(folders("olmoe"), dense="checkpoint"), INT4, MlxLayout())
    hub = folders("qwen3_moe").parent / "hub"
    with pytest.raises(UsageError, match="MLX quantised; hub is none: say int4, int8 or none"):
        write_pack(tmp_path / "pack", open_source(hub), STORED, TorchCpuLayout())


@pytest.mark.parametrize(
    ("family", "why"), [("olmoe", "affine3"), ("granitemoe", "affine2"), ("phimoe", "mxfp8"), ("glm4_moe", "nvfp4")]
)
def test_torch_refuses_bits_without_a_kernel(family, why, folders, tmp_path):
    with pytest.raises(LayoutError, match=rf"no CPU kernel for {why} weights.*use backend=mlx"):
        write_pack(tmp_path / "pack", open_source(folders(family)), STORED, TorchCpuLayout())


def test_torch_refuses_a_group_whose_midpoint_is_no_bf16_number(folders, tmp_path):
    folder = shutil.copytree(folders("qwen3_moe"), tmp_path / "copy")
    tensors = arrays(folder)
    name = next(n for n in tensors if "switch_mlp.down_proj.biases" in n)
    tensors[name] = mx.full(tensors[name].shape, 1000, mx.bfloat16)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    with pytest.raises(LayoutError, match=r"down_proj: zero point of row 0, group 0 is not exact.*use backend=mlx"):
        write_pack(tmp_path / "pack", open_source(folder), STORED, TorchCpuLayout())
    write_pack(tmp_path / "mlx", open_source(folder, dense="checkpoint"), STORED, MlxLayout())


def test_scales_of_fp16_stay_and_torch_refuses_them(tmp_path):
    folder = mlx_folder("qwen3_moe", tmp_path / "made", {"bits": 4}, dtype="float16")
    tensors, source = arrays(folder), open_source(folder, dense="checkpoint")
    assert source.stored == STORED
    path, tensor = Stacks(Checkpoint(folder)).paths[0], source.expert(0, 0)["down_proj"]
    np.testing.assert_array_equal(dequantize(tensor), expected(folder, tensors, path, 0, "down_proj"))
    pack = write_pack(tmp_path / "pack", source, STORED, MlxLayout())
    assert {part.dtype for part in pack.manifest.tensors if "." in part.name} == {"F16"}
    with pytest.raises(LayoutError, match="float16 numbers, which the torch_cpu layout would round"):
        write_pack(tmp_path / "torch", open_source(folder), STORED, TorchCpuLayout())


def test_plain_stacks_are_quantised_as_the_hubs_are(tmp_path):
    folder = mlx_folder("mixtral", tmp_path / "made")
    hub, mlx = (open_source(f) for f in (folder.parent / "hub", folder))
    packs = [write_pack(tmp_path / s, source, INT4, TorchCpuLayout()) for s, source in (("hub", hub), ("mlx", mlx))]
    assert same_experts(*packs)
    assert packs[0].manifest.dense_hash == packs[1].manifest.dense_hash


# --- damaged and foreign folders -----------------------------------------------------------------------------------


def changed(checkpoint: Checkpoint, **settings) -> Checkpoint:
    """A checkpoint whose config.json says something else of its quantisation."""
    found = copy.copy(checkpoint)
    found.config = {**found.config, "quantization": {**found.config["quantization"], **settings}}
    return found


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"bits": 3}, "not 3 bits in groups of 64 as config.json says"),
        ({"group_size": 32}, "not 4 bits in groups of 32"),
        ({"bits": 7}, "bits 7, group_size 64, which is not read"),
        ({"mode": "mxfp4"}, "mode 'mxfp4', bits 4, group_size 64, which is not read"),
        ({"mode": "mxfp4", "group_size": 32}, "not 4 bits in groups of 32"),
        ({"bits": [4]}, "is not read"),
    ],
)
def test_a_config_that_contradicts_the_tensors_is_one_line(settings, why, folders):
    with pytest.raises(StoreError, match=why):
        Stacks(changed(Checkpoint(folders("qwen3_moe")), **settings))


junk = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=80, deadline=None)
@given(found=st.dictionaries(st.sampled_from(("bits", "group_size", "mode")), junk, min_size=1))
def test_whatever_config_says_is_read_or_refused(found, folders):
    checkpoint = Checkpoint(folders("qwen3_moe"))
    with contextlib.suppress(StoreError):
        assert Stacks(changed(checkpoint, **found)).stored == INT4


@pytest.mark.parametrize(
    ("part", "change", "why"),
    [
        ("up_proj.weight", None, "lacks .*up_proj.weight"),
        ("up_proj.scales", None, "is U32 and has no .*up_proj.scales"),
        ("up_proj.biases", None, "up_proj is U32 .* which is not 4 bits"),
        ("down_proj.weight", lambda a: a[:, :, :-1], "down_proj is U32 .* which is not 4 bits"),
        ("down_proj.scales", lambda a: a[0], "down_proj is U32 .* which is not 4 bits"),
        ("gate_proj.weight", lambda a: a[0, 0, 0], "gate_proj is U32 .* which is not 4 bits"),
    ],
)
def test_tensors_that_make_no_experts_are_one_line(part, change, why, folders, tmp_path):
    folder = shutil.copytree(folders("qwen3_moe"), tmp_path / "copy")
    tensors = arrays(folder)
    name = next(n for n in sorted(tensors, reverse=True) if n.endswith(f"switch_mlp.{part}"))
    value = tensors.pop(name)
    if change is not None:
        tensors[name] = mx.contiguous(change(value))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    with pytest.raises(StoreError, match=why) as caught:
        open_source(folder)
    assert "\n" not in str(caught.value)


def test_layers_of_other_groups_are_refused_by_name(tmp_path):
    def predicate(path, _):
        return {"group_size": 32, "bits": 4} if ".layers.1.mlp.switch_mlp.down" in path else True

    folder = mlx_folder("qwen3_moe", tmp_path, {"bits": 4}, predicate)
    with pytest.raises(StoreError, match=r"layers\.\d\.mlp\.switch_mlp\.down_proj is int4 in groups of .*others are"):
        open_source(folder, dense="checkpoint")


def test_a_family_whose_changes_are_unknown_runs_on_mlx_alone(tmp_path):
    folder = mlx_folder("ernie4_5_moe", tmp_path / "made", {"bits": 4})
    open_source(folder, dense="checkpoint")
    with pytest.raises(StoreError, match=r"ernie4_5_moe is not known .*; use backend=mlx with quality=none") as caught:
        open_source(folder)
    assert "\n" not in str(caught.value)


def test_a_source_without_codes_quantises_as_ever():
    weights = np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32)
    with pytest.raises(StoreError, match="quant=stored keeps a checkpoint's codes"):
        quantize("w", weights, STORED)
    assert from_bf16(quantize("w", weights, QuantSpec("none")).values).shape == (2, 64)
