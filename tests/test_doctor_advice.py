"""What the doctor says of a model on a machine: what fits, who is faster, who cannot run, from replays on the spot."""

from __future__ import annotations

import json

import pytest
import yaml
from harness_fixtures import MINI, make_host, mini, plugin  # noqa: F401 - fixtures
from hypothesis import given
from hypothesis import strategies as st

from moebench import hardware
from moebench.cli import main
from moebench.commands.advice import MODEL_FITS, Room, find_geometry
from moebench.geometry import Geometry
from moebench.plugins import load_plugins
from moebench.units import GIB


def narrow_host(home, spare_gib: float) -> None:
    """A machine like this one whose RAM beyond its reserve is ``spare_gib``."""
    text = hardware.load(make_host(home)).quantities["memory.reserve_gib"].text
    memory = {
        "ram_gib": {"value": 5 + spare_gib, "unit": "GiB", "source": f"estimate: {text}"},
        "reserve_gib": {"value": 5, "unit": "GiB", "source": f"estimate: {text}"},
    }
    make_host(home, memory=memory)


def ask(capsys, *words: str) -> tuple[str, dict]:
    assert main(["doctor", *words]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    return "\n".join(lines), json.loads(last)


def test_a_model_that_does_not_fit_is_replayed_and_ranked(mini, tmp_path, capsys):  # noqa: F811
    wide = {**MINI, "hidden": 256, "experts": 32}  # so that a tenth of the experts outweighs activations and state
    (tmp_path / "mini.yaml").write_text(yaml.safe_dump(wide))
    geometry = Geometry(**wide)
    narrow_host(tmp_path / "home", (geometry.dense_bytes + geometry.routed_bytes * 0.6) / GIB)
    text, document = ask(capsys, "model=mini", "hw=host")
    speeds = document["decode_tok_s"]
    registry = load_plugins()
    assert set(speeds) == {n for n, s in registry.systems.items() if not s.oracle and s.sizing != "full"}
    assert speeds["lru"] > speeds["ondemand"]
    exact = [n for n, v in speeds.items() if v is not None and n != "edge0"]
    assert f"advice: start with system={max(exact, key=speeds.get)}" in text
    assert "assumed: routing from a synthetic trace" in text
    assert "flashmoe does not run" in text
    assert "prepare system=flashmoe" in text


def test_a_model_that_fits_is_not_replayed(mini, capsys):  # noqa: F811
    text, document = ask(capsys, "model=mini", "hw=m4pro")
    assert text.endswith(MODEL_FITS)
    assert document["decode_tok_s"] == {}


def test_weights_that_every_token_needs_must_fit(mini, tmp_path, capsys):  # noqa: F811
    narrow_host(tmp_path / "home", Geometry(**MINI).dense_bytes / 2 / GIB)
    text, _ = ask(capsys, "model=mini", "hw=host")
    assert "no system here can run this model" in text


def test_a_machine_without_a_profile_is_sent_to_calibrate(mini, capsys):  # noqa: F811
    text, document = ask(capsys, "model=mini")
    assert "run 'moebench calibrate'" in text
    assert "advice" not in document


@pytest.mark.parametrize(
    ("words", "said"),
    [(["model=nosuch"], "valid: tinymoe, "), (["hw=m4pro"], "needs model="), (["model=mini", "hw=nosuch"], "m4pro")],
)
def test_wrong_words_are_one_line(mini, words, said, capsys):  # noqa: F811
    assert main(["doctor", *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_folder_is_known_by_its_configuration(mini, tmp_path):  # noqa: F811
    registry = load_plugins()
    found = find_geometry("tinymoe", registry)
    assert (found.layers, found.experts, found.top_k) == (8, 32, 4)
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(MINI))
    assert find_geometry("mini", registry) == Geometry(**MINI)


@given(st.integers(0, 10**9), st.integers(0, 10**6))
def test_more_memory_never_holds_less(nbytes, more):
    geometry = Geometry(**MINI)
    smaller, larger = (Room(n, n).holds(geometry) for n in (nbytes, nbytes + more))
    assert 0 <= smaller <= larger <= 1
