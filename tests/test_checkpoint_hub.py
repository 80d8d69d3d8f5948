"""model=org/name: found in the cache of the hub's tools, never fetched; where it was sought stands in every error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from family_checkpoints import make_checkpoint

from moebench.checkpoint.hub import cache_folder, find_model, model_name
from moebench.cli import main
from moebench.errors import UsageError

REVISION = "0123abcd"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder that the environment names."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def stored(cache, name="org/tiny", files=("config.json", "model.safetensors"), ref=REVISION):
    """A snapshot of ``name`` as the hub's tools lay it out: links into blobs."""
    base = cache / f"models--{name.replace('/', '--')}"
    snapshot = base / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (base / "blobs").mkdir()
    (base / "refs").mkdir()
    if ref is not None:
        (base / "refs" / "main").write_text(ref)
    for file in files:
        (base / "blobs" / file).write_text("{}")
        (snapshot / file).symlink_to(Path("../../blobs") / file)
    return snapshot


def test_a_name_of_the_hub_is_its_main_snapshot(cache):
    snapshot = stored(cache)
    assert find_model("org/tiny") == snapshot
    assert model_name(snapshot) == "org/tiny"
    assert find_model(str(snapshot)) == snapshot


def test_a_folder_of_that_name_comes_first(cache, tmp_path, monkeypatch):
    stored(cache)
    monkeypatch.chdir(tmp_path)
    Path("org/tiny").mkdir(parents=True)
    Path("org/tiny/config.json").write_text("{}")
    assert find_model("org/tiny") == Path("org/tiny")
    assert model_name("org/tiny") == "tiny"


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HF_HOME": "/b", "XDG_CACHE_HOME": "/c"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
        ({"HOME": "/d"}, "/d/.cache/huggingface/hub"),
    ],
)
def test_the_cache_lies_where_the_hubs_own_tools_look(given, wanted, monkeypatch):
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(wanted)


@pytest.mark.parametrize(
    ("how", "hint"),
    [
        ({}, "lacks a-1.safetensors"),
        ({"files": ("config.json",)}, "lacks model.safetensors"),
        ({"files": ("model.safetensors",)}, "has no config.json"),
        ({"ref": None}, "neither a folder nor in the hub cache"),
        ({"ref": "../../../elsewhere"}, "names no revision"),
        ({"ref": ".."}, "names no revision"),
        ({"name": "org/other"}, "neither a folder nor in the hub cache"),
    ],
)
def test_what_is_absent_or_incomplete_says_where_and_how_to_get_it(how, hint, cache):
    if not how:
        snapshot = stored(cache, files=("config.json",))
        (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "a-1.safetensors"}}))
    else:
        stored(cache, **how)
    with pytest.raises(UsageError, match=hint) as caught:
        find_model("org/tiny")
    assert str(cache) in str(caught.value)
    assert str(caught.value).endswith("get it with: hf download org/tiny")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("word", ["nowhere", "a/b/c", "../up/x", "./x", "org/..", "org/na me", "/abs/x", "org/"])
def test_what_is_no_name_of_the_hub_is_only_a_path(word, cache):
    with pytest.raises(UsageError, match=r"is no model folder with config\.json: it does not exist"):
        find_model(word)


def test_a_model_of_the_cache_runs_under_its_hub_name(cache, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MOEBENCH_HOME", str(tmp_path / "home"))
    snapshot = stored(cache, files=())
    for file in make_checkpoint("olmoe", tmp_path / "model", shards=2).iterdir():
        (snapshot / file.name).symlink_to(file)
    for name in ("other.json", "consolidated.safetensors"):  # of what was fetched in part
        (snapshot / name).symlink_to("nowhere")
    words = ["system=lru", "hw=m4pro", "mode=model", "model=org/tiny", "quality=none", f"out={tmp_path / 'rows'}"]
    assert main(["run", *words, "workload.requests=1", "workload.new_tokens=4", "warmup_tokens=1"]) == 0
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert row["model"] == "org/tiny"
    (file,) = (tmp_path / "rows").rglob("*.json")
    assert file.parent.parent.parent == tmp_path / "rows"
    (pack,) = (p for p in (tmp_path / "home" / "packs").iterdir() if p.is_dir())
    assert pack.name.startswith("org--tiny-")
