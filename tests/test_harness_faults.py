"""What cannot run: every fault of a system, a model's files, a pack or a word is one line, and a failed row."""

# ruff: noqa: F811 - fixtures are imported

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from harness_fixtures import LIVE, WORDS, error_line, live, make_host, mini, packs, plugin  # noqa: F401 - fixtures
from safetensors.torch import load_file, save_file

from moebench.cli import main
from moebench.harness.plan import embedded_folder

BROKEN = """
from moebench.hookspecs import hookimpl
from moebench.systemspec import SystemSpec

class Broken:
    @hookimpl
    def end_step(self, step):
        if step.index == 9:
            {failure}

@hookimpl
def register_systems(register):
    register(SystemSpec("broken", "Broken", "fails", lambda config, run: Broken()))
"""


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        ("raise ValueError('out of luck')", "out of luck"),
        ("{}['gone']", "KeyError: 'gone'"),
        ("raise OSError('the disk is gone')", "the disk is gone"),
        ("raise AssertionError", "AssertionError"),
    ],
)
def test_a_system_that_fails_becomes_a_failed_row(mini, plugin, capsys, failure, words):
    plugin("broken", BROKEN.replace("{failure}", failure))
    assert main(["run", "system=broken", *WORDS, "out=here"]) == 1
    shown = capsys.readouterr()
    (row,) = json.loads(shown.out.splitlines()[-1])["rows"]
    assert row["status"] == "failed"
    assert words in row["error"]
    assert all(metric["value"] is None for metric in row["metrics"].values())
    assert f"failed broken, mini: {row['error']}" in " ".join(shown.out.split())
    assert "Traceback" not in shown.err
    (file,) = Path("here").rglob("*.json")
    assert json.loads(file.read_text())["status"] == "failed"


def test_debug_shows_where_a_system_failed(mini, plugin, capsys):
    plugin("broken", BROKEN.replace("{failure}", "{}['gone']"))
    assert main(["run", "system=broken", *WORDS, "debug=true"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "hints"),
    [
        (["model=minni"], ["mini", "tinymoe", "auto"]),
        (["engine=prea"], ["pread", "direct", "mmap"]),
        (["model=./nowhere"], ["config.json"]),
        (["mode=measure"], ["this one is not Mac mini", "hw=host", "mode=model"]),
        (["hw=host"], ["moebench calibrate"]),
        (["workload=prompts"], ["mini is a geometry"]),
        (["budget=20KiB"], ["budget=32768B"]),
        (["memory=1KiB"], ["raise memory="]),
        (["workload.batch=3"], ["more than workload.requests=2"]),
        (["codec=rans", "hw=snapdragon_8_elite_gen5"], ["compute.rans_gb_s", "a machine that does: m2_16gb, m4pro"]),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_2(mini, capsys, words, hints):
    given = {word.partition("=")[0] for word in words}
    assert main(["run", *(word for word in WORDS if word.partition("=")[0] not in given), *words]) == 2
    line = error_line(capsys)
    for hint in hints:
        assert hint in line
    assert not list(Path().rglob("results/**/*.json"))


@pytest.fixture
def folder(tmp_path):
    """A copy of the embedded model to spoil."""
    shutil.copytree(embedded_folder(), tmp_path / "own")
    return tmp_path / "own"


def failed(capsys, words, expected=1) -> str:
    """The error of the only row of a live run on this folder's model."""
    short = [f"{k}={v}" for k, v in LIVE.items() if k != "model"]
    code = main(["run", "hw=m4pro", *short, *words])
    shown = capsys.readouterr()
    assert code == expected
    assert "Traceback" not in shown.err
    (row,) = json.loads(shown.out.splitlines()[-1])["rows"]
    assert "\n" not in (row["error"] or "")
    return row["error"]


def test_a_users_own_folder_runs_without_noise(live, folder, capsys):
    assert failed(capsys, ["model=./own"], 0) is None
    assert main(["run", "hw=m4pro", "model=./own", *(f"{k}={v}" for k, v in LIVE.items() if k != "model")]) == 0
    err = capsys.readouterr().err
    assert [line for line in err.splitlines() if not line.startswith("wrote ")] == []


def test_weights_that_are_damaged_are_named(live, folder, capsys):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    assert "own/model.safetensors is not a safetensors file, or was cut short" in failed(capsys, ["model=./own"])


def test_a_model_that_lacks_a_tensor_is_refused_and_not_filled_at_random(live, folder, capsys):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    gone = next(name for name in tensors if name.endswith("q_proj.weight"))
    save_file({name: tensor for name, tensor in tensors.items() if name != gone}, file, {"format": "pt"})
    assert f"lacks 1 tensors: {gone}" in failed(capsys, ["model=./own"])


def test_an_empty_prompt_is_refused(live, capsys, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": ""}\n')
    words = [f"{k}={v}" for k, v in LIVE.items()]
    assert main(["run", "hw=m4pro", "workload=prompts", "workload.path=p.jsonl", *words]) == 2
    assert "a prompt of p.jsonl is empty" in error_line(capsys)


def test_a_missing_tokenizer_is_named_before_anything_is_packed(live, folder, packs, capsys):
    for file in folder.glob("tokenizer*"):
        file.unlink()
    before = sorted(packs.iterdir())
    assert "cannot load the tokenizer at" in failed(capsys, ["model=./own"])
    assert sorted(packs.iterdir()) == before


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "no_such_family"}'])
def test_a_configuration_that_is_none_is_one_line(live, folder, capsys, text):
    (folder / "config.json").write_text(text)
    assert "own" in failed(capsys, ["model=./own"])


@pytest.mark.parametrize("spoil", ["manifest", "short", "bytes", "dense"])
def test_a_damaged_pack_says_what_to_remove(live, packs, capsys, tmp_path, spoil):
    options = ["model=tinymoe", "system=ondemand"]
    assert failed(capsys, options, 0) is None
    (tmp_path / "home" / "packs").unlink()
    shutil.copytree(packs, tmp_path / "home" / "packs")
    (pack,) = filter(Path.is_dir, (tmp_path / "home" / "packs").glob("tinymoe-*-int4-*"))
    experts, manifest, dense = (pack / name for name in ("experts.bin", "manifest.json", "dense.safetensors"))
    if spoil == "manifest":
        manifest.write_text(manifest.read_text().replace('"layers": 8', '"layers": 7'))
    elif spoil == "dense":
        dense.unlink()
    else:
        data = experts.read_bytes()
        experts.write_bytes(data[:-1] if spoil == "short" else bytes(len(data)))
    error = failed(capsys, options)
    assert "remove" in error
    assert str(pack) in error


def test_damage_under_a_measured_replay_is_a_failed_row(mini, tmp_path, capsys):
    make_host(tmp_path / "home")
    words = [word for word in WORDS if not word.startswith("hw=")]
    assert main(["run", "system=ondemand", "hw=host", *words]) == 0
    capsys.readouterr()
    file = tmp_path / "home" / "packs" / "random-mini-4x16x128x64-int4-64-packed-none" / "experts.bin"
    file.write_bytes(bytes(file.stat().st_size))
    assert main(["run", "system=ondemand", "hw=host", *words]) == 1
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert re.search(r"experts\.bin: layer \d+, expert \d+, offset \d+: wrong bytes.*remove", row["error"])


@pytest.mark.parametrize(
    ("words", "hint"),
    [(["budget=1KiB"], "budget=65536B"), (["layout=ordered", "order=nowhere"], "order=nowhere: no such")],
)
def test_what_is_refused_is_refused_before_anything_is_packed(mini, tmp_path, capsys, words, hint):
    make_host(tmp_path / "home")
    live = [f"{key}={value}" for key, value in LIVE.items()]
    assert main(["run", "system=lru", "hw=host", *live, *words]) == 2
    assert hint in error_line(capsys)
    assert not list((tmp_path / "home").glob("packs/*/experts.bin"))
    if words == ["budget=1KiB"]:
        replay = [word for word in WORDS if not word.startswith("hw=")]
        assert main(["run", "system=lru", "hw=host", *replay, *words]) == 2
        assert "needs at least" in error_line(capsys)
        assert not list((tmp_path / "home").glob("packs/*"))
