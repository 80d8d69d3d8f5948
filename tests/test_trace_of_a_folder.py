"""A trace replays in the geometry of the model folder that is named, without its weights."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
from replayed_rows import TRACES

from moebench.config import RunConfig, WorkloadConfig
from moebench.errors import MoebenchError
from moebench.harness.plan import embedded_folder, plan
from moebench.plugins import load_plugins
from moebench.systemspec import NoKnobs

TRACE = WorkloadConfig("trace", path=str(TRACES / "tinymoe.safetensors"))
CONFIG = RunConfig("lru", "m4pro", NoKnobs(), "tinymoe", TRACE)


def test_the_shipped_model_and_a_folder_replay_in_their_own_geometry(tmp_path):
    registry = load_plugins()
    (shipped,) = plan(CONFIG, registry)
    assert not shipped.live
    assert shipped.model == "tinymoe"
    assert (shipped.geometry.layers, shipped.geometry.experts, shipped.geometry.top_k) == (8, 32, 4)
    (tmp_path / "own").mkdir()
    shutil.copy(embedded_folder() / "config.json", tmp_path / "own")  # no weights are needed
    (own,) = plan(replace(CONFIG, model=str(tmp_path / "own"), quant="int8"), registry)
    assert own.geometry == replace(shipped.geometry, name="own", quant="int8")
    (live,) = plan(replace(CONFIG, workload=WorkloadConfig("synthetic")), registry)
    assert live.live


def test_a_configuration_that_is_no_json_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(MoebenchError, match=r"config\.json is not JSON"):
        plan(replace(CONFIG, model=f"{tmp_path}/"), load_plugins())
