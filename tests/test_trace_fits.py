"""Parameter files of synthetic routing: what they say is reached, by any seed, and is that of the real trace."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import yaml

from moebench import geometry
from moebench.cli import main
from moebench.plugins import load_plugins
from moebench.residency.targets import Measures
from moebench.trace import fits
from moebench.trace.fits import Fit, FitError, Target
from moebench.trace.format import TraceError, load
from moebench.trace.importers import import_npz
from moebench.trace.stats import top_share
from moebench.trace.synthetic import SyntheticSpec, synthesize, uniform

FOLDER = Path(os.environ.get("MOEBENCH_TRACES", Path(__file__).parents[2] / "shared" / "traces"))
DOCS = Path(__file__).parents[1] / "docs" / "traces.md"
recordings = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no recorded traces in {FOLDER}; set MOEBENCH_TRACES")
FITS = {name: fits.of_model(name) for name in fits.names()}
CURVES = ("lru", "belady", "overlap", "top_in_sequence", "reuse_within")


@cache
def measured(name):
    return Measures(synthesize(FITS[name].spec()))


def miss(target, value):
    return abs(value - target.value) / target.tolerance


@pytest.mark.parametrize("name", FITS)
def test_a_fit_reaches_what_it_says(name):
    for target in FITS[name].targets:
        assert measured(name)(target.statistic) == pytest.approx(target.reached, abs=6e-5), target.statistic
        assert miss(target, target.reached) < 3, target.statistic


@pytest.mark.parametrize("name", FITS)
def test_most_statistics_are_within_their_tolerance(name):
    inside = [miss(target, target.reached) <= 1 for target in FITS[name].targets]
    assert sum(inside) >= 0.65 * len(inside)
    if FITS[name].basis == "borrowed" or len(inside) == 1:
        assert all(inside)


def test_curves_of_the_real_trace_are_met_within_three_points():
    fit = FITS["gpt-oss-20b"]
    of_curves = [t for t in fit.targets if t.statistic.split("@")[0].removesuffix("_shared") in ("lru", "belady")]
    assert len(of_curves) >= 10
    assert max(abs(t.reached - t.value) for t in of_curves) <= 0.03


@pytest.mark.parametrize("name", ["gpt-oss-20b", "qwen3-30b-a3b"])
def test_another_seed_gives_the_same_statistics(name):
    other = Measures(synthesize(replace(FITS[name].spec(), seed=1)))
    misses = [miss(target, other(target.statistic)) for target in FITS[name].targets]
    assert sum(m * m for m in misses) / len(misses) < 1.5


def test_the_general_defaults_and_uniform_routing_do_not_match():
    fit = FITS["gpt-oss-20b"]
    for other in (synthesize(SyntheticSpec(**fit.shape)), uniform(SyntheticSpec(**fit.shape))):
        measure = Measures(other)
        assert sum(miss(t, measure(t.statistic)) > 1 for t in fit.targets) > len(fit.targets) / 3


@recordings
def test_targets_are_those_of_the_recording():
    measure = Measures(import_npz(FOLDER / "gpt-oss-20b"))
    for target in FITS["gpt-oss-20b"].targets:
        if target.statistic.split("@")[0] in CURVES:
            assert measure(target.statistic) == pytest.approx(target.value, abs=6e-5), target.statistic


@recordings
def test_a_published_fit_foretells_a_recording_it_has_not_seen():
    """Qwen3-30B-A3B run with six experts a token; nothing of it was a target."""
    real = Measures(import_npz(FOLDER / "qwen3-30b-a3b_k6"))
    made = Measures(synthesize(FITS["qwen3-30b-a3b"].spec(layers=48, top_k=6, sequences=1, prefill=0, decode=129)))
    for statistic in ("overlap@1", "lru@0.125", "lru@0.25", "belady@0.125", "belady@0.25"):
        assert made(statistic) == pytest.approx(real(statistic), abs=0.07), statistic


@pytest.mark.parametrize("name", FITS)
def test_parameters_make_a_trace_of_the_geometry(name):
    shape = geometry.load(load_plugins().model_path(name))
    fit = FITS[name]
    assert fit.model == name
    sizes = {"layers": shape.layers, "experts": shape.experts, "top_k": shape.top_k}
    trace = synthesize(fit.spec(**sizes, sequences=1, prefill=2, decode=2))
    assert (trace.layers, trace.expert_count, trace.top_k) == tuple(sizes.values())
    assert fit.assumption
    if fit.basis == "measured" or (fit.basis == "published" and len(fit.targets) > 1):
        assert (fit.shape["experts"], fit.shape["top_k"]) == (shape.experts, shape.top_k)


def test_the_page_shows_every_target_of_every_fit():
    page = DOCS.read_text()
    for name, fit in FITS.items():
        section = page.partition(f"### {name}\n")[2].partition("###")[0]
        assert fit.note in section
        for t in fit.targets:
            assert f"| `{t.statistic}` | {t.value:g} | {t.tolerance:g} | {t.reached:g} | {t.source} |" in section


def test_shift_flattens_the_head():
    spec = SyntheticSpec(layers=4, experts=64, top_k=4, sequences=2, prefill=0, decode=200, skew=1.5, reach=1.0)
    shares = [top_share(synthesize(replace(spec, shift=s)), 0.125, within_sequence=True) for s in (0.0, 0.1, 0.5)]
    assert shares[0] > shares[1] + 0.03 > shares[2] + 0.06


def test_a_sequence_of_its_own_starts_empty():
    measure = Measures(synthesize(SyntheticSpec(layers=2, experts=16, top_k=2, sequences=4, prefill=0, decode=40)))
    assert measure("lru_reset@0.5") < measure("lru@0.5")
    assert measure("lru_shared@0.5") != measure("lru@0.5")
    for wrong in ("mru@0.5", "lru", "overlap@5"):
        with pytest.raises(TraceError, match=r"is not one of overlap@NUMBER"):
            measure(wrong)


GOOD = {"model": "toy", "basis": "measured", "note": "-", "shape": {}, "free": (), "parameters": {}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"basis": "guessed"}, "measured, published, borrowed"),
        ({"basis": "borrowed"}, "borrowed_from"),
        ({"borrowed_from": "x"}, "borrowed_from"),
        ({"free": ("layers",)}, "'layers' is not one of skew"),
        ({"parameters": {"slope": 1.0}}, "'slope' is not one of skew"),
        ({"shape": {"skew": 1}}, "'skew', which is not one of layers"),
    ],
)
def test_bad_fits_are_refused(change, message):
    Fit(**GOOD)
    with pytest.raises(FitError, match=message):
        Fit(**{**GOOD, **change})


def test_bad_files_are_refused(tmp_path):
    path = tmp_path / "toy.yaml"
    target = {"value": 0.5, "tolerance": 0.0, "source": "x"}
    for text, message in (
        ("[1, 2]", "toy.yaml"),
        ("model: toy", "toy.yaml"),
        (yaml.safe_dump({**GOOD, "free": [], "targets": {"overlap@1": target}}), "tolerance above 0"),
        (yaml.safe_dump({**GOOD, "free": [], "colour": "red"}), "colour"),
    ):
        path.write_text(text)
        with pytest.raises(FitError, match=message):
            fits.load(path)
    assert Target("overlap@1", 0.5, 0.1, "x").reached is None
    assert fits.of_model("no-such-model") is None


def test_a_synthetic_trace_has_the_parameters_of_its_geometry(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["trace", "synth", "out=a.safetensors", "sequences=1", "prefill=0", "decode=8"]
    found = {}
    for name, more in (("own", []), ("moved", ["skew=2.0"]), ("none", None)):
        assert main([*words, *(["model=olmoe-1b-7b", *more] if more is not None else ["layers=16", "experts=64"])]) == 0
        found[name] = load("a.safetensors").metadata
    fit = fits.of_model("olmoe-1b-7b")
    assert found["own"]["fitted"] == fit.assumption
    assert found["own"]["parameters"] | fit.parameters == found["own"]["parameters"]
    assert found["moved"]["parameters"] == found["own"]["parameters"] | {"skew": 2.0}
    assert "fitted" not in found["moved"]
    assert found["none"]["parameters"]["skew"] == SyntheticSpec.skew
    assert fits.synthetic("no-such-model", decode=2).metadata["fitted"].startswith("with the general parameters")
