"""Claims are complete data: every arm can be planned, every input that a profile takes from a paper is declared, every
mistake is one line, and each published number stands in one place.
"""

from __future__ import annotations

import copy

import pytest
import yaml

from moebench import claimfiles, hardware
from moebench.claims import Band
from moebench.commands.reproduce import ReproduceOptions, configured
from moebench.errors import UsageError
from moebench.harness.plan import plan
from moebench.plugins import load_plugins

SEED_ARTICLE = ("7 MB", "34.2 %", "51 %", "4.83x", "82 %")
LEAST = {  # at least so many claims of each paper
    "edge0": 50, "ssd_llama": 25, "bigmomo": 20, "flashmoe": 20, "specprefetch": 25, "moe_infinity": 10,
}  # fmt: skip


@pytest.fixture(autouse=True)
def hermetic(monkeypatch, tmp_path):
    monkeypatch.setenv("MOEBENCH_PLUGINS", "")
    monkeypatch.setenv("MOEBENCH_HOME", str(tmp_path))


@pytest.fixture
def registry(hermetic):
    return load_plugins()


def everything():
    return [(paper, claim) for paper in claimfiles.papers() for claim in paper.claims.values()]


def test_each_paper_has_its_claims_under_names_of_their_own():
    assert {paper.name: len(paper.claims) >= LEAST[paper.name] for paper in claimfiles.papers()} == dict.fromkeys(
        sorted(LEAST), True
    )
    names = [claim.name for _, claim in everything()]
    assert len(set(names)) == len(names)
    assert all(claim.name.startswith(paper.name) for paper, claim in everything())


def test_the_seed_articles_figures_are_among_them():
    seeds = [claim.seed for _, claim in everything() if claim.seed]
    assert all(any(seed.startswith(figure) for seed in seeds) for figure in SEED_ARTICLE)


@pytest.mark.parametrize("paper", claimfiles.papers(), ids=lambda paper: paper.name)
def test_every_cell_of_a_claim_can_be_planned_and_is_one_cell_that_is_modeled(paper, registry):
    for arm in paper.arms.values():
        if arm.kind == "run":
            (cell,) = plan(configured(arm, ReproduceOptions(), registry), registry)
            assert cell.clock == "virtual"
            assert not cell.live
        else:
            assert arm.options["model"] in registry.models


def named_by(paper, text):
    return any(key in text for key in paper.keys)


@pytest.mark.parametrize("paper", claimfiles.papers(), ids=lambda paper: paper.name)
def test_whatever_a_profile_takes_from_a_paper_is_declared_by_its_claims(paper, registry):
    machines = {arm.options["hw"] for arm in paper.arms.values() if arm.kind == "run"}
    assert machines
    for name in machines:
        profile = hardware.load(registry.hardware_path(name))
        texts = {key: quantity.text for key, quantity in profile.quantities.items()}
        texts["read_curve"] = profile.read_curve.text
        used = {arm.options.get("stack", profile.stack) for arm in paper.arms.values() if arm.options.get("hw") == name}
        for stack in used:
            numbers = profile.constants(stack).quantities
            texts |= {f"stacks.{stack}.{key}": quantity.text for key, quantity in numbers.items()}
        taken = {key for key, text in texts.items() if named_by(paper, text)}
        declared = {i.what.replace(",", " ").split()[0] for i in paper.inputs if i.of == name}
        assert taken <= declared, f"{paper.name}: {name} takes {taken - declared} from the paper"


def test_a_result_of_the_same_paper_spoils_what_it_bears_on_and_nothing_else():
    edge0 = claimfiles.paper("edge0")
    assert edge0.shared(edge0.claims["edge0_m2_k4_on_tok_s"])
    assert not edge0.shared(edge0.claims["edge0_m2_k4_on_allocator"])
    assert not edge0.shared(edge0.claims["edge0_step_bytes"])
    bigmomo = claimfiles.paper("bigmomo")
    assert bigmomo.shared(bigmomo.claims["bigmomo_stall_full"])  # its tau
    assert not bigmomo.shared(bigmomo.claims["bigmomo_stall_speculative"])


def test_figures_beside_rows_are_those_of_claims(registry):
    count = 0
    for spec in registry.systems.values():
        for found in spec.published:
            for name in found.metrics.values():
                assert isinstance(name, str), f"{spec.id}: a number that stands outside configs/claims"
            assert all(value and source for value, source in found.figures().values())
            count += len(found.metrics)
    assert count > 10


def test_a_time_per_token_becomes_a_rate():
    assert claimfiles.figure("ssd_llama_deepseek_device_ms", "decode_tok_s")[0] == pytest.approx(1e3 / 513.95)
    assert claimfiles.figure("moe_infinity_mixtral", "decode_tok_s")[0] == pytest.approx(1 / 0.735)
    with pytest.raises(UsageError, match="about decode_tok_s, not about peak_active_gib"):
        claimfiles.figure("edge0_m4pro_tok_s", "peak_active_gib")


PLAIN = {
    "title": "A paper",
    "keys": ["1234.5"],
    "bands": {"wide": {"factor": 2, "why": "a test"}},
    "inputs": [{"of": "m4pro", "what": "something", "kind": "result", "bears_on": ["time"]}],
    "arms": {"one": {"system": "lru", "hw": "m4pro", "model": "olmoe-1b-7b"}, "two": {"like": "one", "system": "lfu"}},
    "claims": {
        "fast": {"says": "it is fast", "published": 10, "unit": "tok/s", "source": "a page", "metric": "decode_tok_s",
                 "of": "one", "band": "wide"},
        "faster": {"says": "by far", "published": [2, 3], "unit": "x", "source": "a page", "metric": "decode_tok_s",
                   "form": "ratio", "of": ["one"], "over": ["two"], "band": "wide"},
    },
}  # fmt: skip


def write(tmp_path, data):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def test_a_file_becomes_claims_and_arms_inherit(tmp_path):
    found = claimfiles.load(write(tmp_path, PLAIN))
    assert found.claims["fast"].published == (10, 10)
    assert found.arms["two"].options == {"system": "lfu", "hw": "m4pro", "model": "olmoe-1b-7b"}
    assert [i.what for i in found.shared(found.claims["fast"])] == ["something"]


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("extra", 1, "title, keys"),
        ("claims.fast.extra", 1, "unknown key"),
        ("claims.fast.says", "", "says is empty"),
        ("claims.fast.source", "", "source is empty"),
        ("claims.fast.published", "ten", "published must be"),
        ("claims.fast.published", [3, 2], r"\[low, high\]"),
        ("claims.fast.metric", "speed", "unknown quantity.*decode_tok_s"),
        ("claims.fast.band", "narrow", "unknown band.*wide"),
        ("claims.fast.band", None, "needs a band"),
        ("claims.fast.band", {"factor": 0.5, "why": "x"}, "factor above 1"),
        ("claims.fast.band", {"factor": 2, "why": ""}, "needs its why"),
        ("claims.fast.of", "three", "unknown arm.*one, two"),
        ("claims.fast.of", [], "needs arms"),
        ("claims.fast.not_testable", "no", "and not both"),
        ("claims.fast.form", "ratio", "take over"),
        ("claims.fast.take", "mean", "several arms need take"),
        ("claims.fast.take", "worst", "unknown take.*best_at"),
        ("claims.faster.over", ["one", "two"], "as many arms"),
        ("arms.two.like", "none", "unknown arm that two is like.*one"),
        ("arms.one.kind", "guess", "unknown kind of arm.*cache"),
        ("arms.three", {"system": "lru"}, "no claim uses arm three"),
        ("bands.wide.points", 1, "factor above 1 or points"),
        ("inputs", [{"of": "m4pro", "what": "x", "kind": "rumour"}], "unknown input kind.*setting"),
        ("inputs", [{"of": "m4pro", "what": "x", "kind": "result"}], "bears on something"),
        ("inputs", [{"of": "m4pro", "what": "x", "kind": "result", "bears_on": ["mood"]}], "unknown family.*memory"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_file(tmp_path, path, value, said):
    data = copy.deepcopy(PLAIN)
    *way, last = path.split(".")
    place = data
    for key in way:
        place = place[key]
    place[last] = value
    with pytest.raises(UsageError, match=said) as caught:
        claimfiles.load(write(tmp_path, data))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["title", "keys", "claims"])
def test_a_file_that_lacks_something_says_what(tmp_path, name):
    with pytest.raises(UsageError, match=name):
        claimfiles.load(write(tmp_path, {key: value for key, value in PLAIN.items() if key != name}))


def test_bands_widen_both_ends():
    factor, points = Band("x", factor=1.25), Band("x", points=5)
    assert factor.holds((10, 20), 8)
    assert factor.holds((10, 20), 25)
    assert not factor.holds((10, 20), 7.9)
    assert not factor.holds((10, 10), 12.6)
    assert factor.holds((-10, -10), -12)
    assert not factor.holds((10, 10), -10)
    assert points.holds((10, 10), 5)
    assert not points.holds((10, 10), 15.1)


def test_claims_are_chosen_by_name_and_by_paper():
    assert [claim.name for _, claim in claimfiles.chosen(["edge0_overlap"])] == ["edge0_overlap"]
    assert len(claimfiles.chosen(["edge0"])) == len(claimfiles.paper("edge0").claims)
    assert len(claimfiles.chosen(["all"])) == len(everything())
    with pytest.raises(UsageError, match=r"did you mean edge0_overlap"):
        claimfiles.chosen(["edge0_overlp"])
