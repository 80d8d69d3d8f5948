"""Runs of model folders: what a message recommends can be typed, and a row says when texts outgrow the model."""

from __future__ import annotations

import json

import pytest
from family_checkpoints import make_checkpoint

import moebench
from moebench import hashes
from moebench.commands.record import RecordingExperts
from moebench.engine.loop import Loop
from moebench.errors import UsageError
from moebench.harness.assets import load_live
from moebench.harness.backend import open_backend
from moebench.hashes import kept_file_hash
from moebench.store.pages import aligned_buffer

RUN = {"hw": "m4pro", "quality": "none", "warmup_tokens": 0, "budget": "0.6"}
WORK = {"requests": 1, "new_tokens": 4}


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home of one's own."""
    monkeypatch.setenv("MOEBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MOEBENCH_PLUGINS", "")
    return tmp_path / "home"


def test_a_command_that_is_recommended_names_the_folder_as_it_was_given(home, tmp_path):
    folder = make_checkpoint("olmoe", tmp_path / "deep" / "tiny")
    for system in ("specprefetch", "flashmoe", "moe_infinity"):
        with pytest.raises(UsageError, match=f"moebench prepare system={system} model={folder}([,; ]|$)"):
            moebench.run(system=system, model=str(folder), workload=WORK, **RUN)


@pytest.mark.parametrize(("positions", "said"), [(16, True), (4096, False)])
def test_texts_beyond_the_models_positions_are_said_in_the_row(positions, said, home, tmp_path):
    folder = make_checkpoint("olmoe", tmp_path / "tiny", max_position_embeddings=positions)
    (row,) = moebench.run(system="lru", model=str(folder), workload=WORK, **RUN)
    assert row.status == "ok"
    assert any(line.endswith("tokens through a model made for 16") for line in row.assumptions) == said


def test_an_answer_ends_at_any_of_the_tokens_that_the_folder_names(home, tmp_path):
    """What a run would write third becomes a second end: answers are cut there, wherever the model is loaded."""
    folder = make_checkpoint("olmoe", tmp_path / "tiny")
    file = folder / "generation_config.json"

    def answer():
        model = load_live(folder, "tiny", "int4", "packed")
        experts = RecordingExperts(model.pack, aligned_buffer(model.pack.slot_bytes))
        loop = Loop(open_backend("torch", model, "row_invariant"), experts)
        return loop.generate([[5, 6, 7]], 12, stop=model.ends).tokens[0]

    file.write_text("{}")
    alone = answer()
    file.write_text(json.dumps({"eos_token_id": [97, alone[2]]}))
    assert answer() == alone[: alone.index(alone[2]) + 1] != alone


@pytest.mark.parametrize("said", ['{"eos_token_id": "</s>"}', '{"eos_token_id": [true]}', "[1]", "{"])
def test_ends_that_are_no_tokens_are_refused_by_name(said, home, tmp_path):
    folder = make_checkpoint("olmoe", tmp_path / "tiny")
    (folder / "generation_config.json").write_text(said)
    (row,) = moebench.run(system="lru", model=str(folder), workload=WORK, **RUN)
    assert row.status == "failed"
    assert "generation_config.json" in row.error
    assert not home.joinpath("packs").exists(), "refused before it is packed"


def test_a_hash_that_cannot_be_kept_is_a_hash_all_the_same(home, tmp_path, monkeypatch):
    monkeypatch.setattr(hashes, "LARGE", 10)
    monkeypatch.setattr(hashes, "SETTLED_S", -1.0)
    home.write_text("no folder")
    (tmp_path / "weights").write_bytes(b"x" * 64)
    assert kept_file_hash(tmp_path / "weights") == hashes.file_hash(tmp_path / "weights")
