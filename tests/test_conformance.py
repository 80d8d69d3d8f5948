"""All registered systems pass the conformance suite, what is skipped is skipped for a reason, and planted defects are
found by the tests that are named for them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest
from harness_fixtures import install_plugin
from planted_systems import PLANTED

from moebench.plugins import load_plugins
from moebench.testing.audit import Chance
from moebench.testing.lab import Lab
from moebench.testing.plugin import LAB
from moebench.testing.replays import record
from moebench.testing.subject import Subject
from moebench.testing.test_future import DEVIATIONS, chances, check_causal

HEAVY = """
import torch

from moebench.hookspecs import hookimpl
from moebench.systemspec import SystemSpec


def make(config, run):
    return torch


@hookimpl
def register_systems(register):
    register(SystemSpec(id="heavy", title="Heavy", summary="imports torch", make=make))
"""


class Outcomes:
    """A pytest plugin: what became of each test, by system and name, and why some were skipped. Lends the suite a lab
    that was made before.
    """

    def __init__(self, lab: Lab | None) -> None:
        self.lab = lab
        self.of = defaultdict(lambda: defaultdict(set))
        self.reasons = {}

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config):
        config.stash[LAB] = self.lab

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            name, system = re.search(r"::(\w+)\[([a-z0-9_]+)", report.nodeid).groups()
            self.of[system][report.outcome].add(name)
            if report.skipped:
                self.reasons[system, report.nodeid] = report.longrepr[2]


def suite(*words: str, lab: Lab | None = None) -> tuple[int, Outcomes]:
    """Run the suite in this process."""
    found = Outcomes(lab)
    if lab is not None:
        lab.registry = load_plugins()  # other plugins may be installed by now
    options = ["-q", "-p", "no:cacheprovider", "--tb=line", "--pyargs", "moebench.testing", *words]
    return int(pytest.main(options, plugins=[found])), found


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("lab"), 120.0)


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """The planted systems, installed."""
    folder = tmp_path_factory.mktemp("planted")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        install_plugin(folder, "planted", Path(__file__).with_name("planted_systems.py").read_text())
        install_plugin(folder, "heavy", HEAVY)
        patch.setenv("MOEBENCH_PLUGINS", "planted,heavy")
        yield


# --- all systems ---

FILES = {"edge0", "flashmoe", "moe_infinity", "specprefetch", "bigmomo"}
SKIPPED = {  # test -> systems to which it cannot apply
    "test_what_is_routed_ahead_was_staged": lambda all_: all_ - {"edge0"},
    "test_files_for_another_model_are_refused": lambda all_: all_ - FILES,
    "test_native_routing_is_executed": lambda all_: {"edge0"},
    "test_the_smallest_budget_runs_and_a_smaller_one_is_refused": lambda all_: {"resident", "ondemand", "mmap"},
    "test_what_comes_later_changes_nothing_before": lambda all_: {"belady"},
    "test_chance_is_not_beaten": lambda all_: {"belady"},
    "test_answers_hold_in_arrangements_that_a_system_may_refuse": lambda all_: {"resident", "mmap", "bigmomo"},
}


def test_every_system_passes_and_skips_are_those_that_must_be(lab):
    code, found = suite("--system=all", lab=lab)
    systems = set(load_plugins().systems)
    assert {name: sorted(found.of[name]["failed"]) for name in systems if found.of[name]["failed"]} == {}
    assert code == 0
    assert set(found.of) == systems
    for test in set().union(*(found.of[name]["skipped"] for name in systems)) | set(SKIPPED):
        skipped = {name for name in systems if test in found.of[name]["skipped"]}
        assert skipped == SKIPPED[test](systems), test
    assert len(found.reasons) == sum((len(systems) - 1, 3 * (len(systems) - len(FILES)), 2, 3, 1, 1, 2 + 3 + 2))


@pytest.mark.parametrize(
    ("system", "option", "tests", "reason"),
    [
        ("edge0", "first_token=heads", "request or executed", "declares that it alters routing"),
        ("bigmomo", "tau=0.3", "request or smallest", "depends on what is resident"),
        ("bigmomo", "draft=lookup", "smallest or future", "refuses to replay"),
        ("specprefetch", "mode=oracle", "future or executed", "knows the future"),
        ("ssd_llama", "placement=2", "smallest or memory", "options about a host tier"),
        ("ssd_llama", "granularity=gate", "smallest or memory or future", "refuses to run live"),
    ],
)
def test_options_other_than_the_defaults(lab, system, option, tests, reason):
    code, found = suite(f"--system={system}", "--system-option", option, "-k", tests, lab=lab)
    assert code == 0
    assert found.of[system]["passed"]
    assert reason in " ".join(found.reasons.values())


# --- what is refused ---


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--system=edgeO",), "unknown system 'edgeO' (did you mean edge0?); valid: "),
        (("--system=lru", "--system-option", "depth=1"), "system lru has no option 'depth'"),
        (("--system=lru", "--system-option", "depth"), "--system-option 'depth' is not NAME=VALUE"),
        ((), "which system? --system=ID"),
    ],
)
def test_wrong_use_is_one_line(words, line, capfd):
    assert suite(*words)[0] == pytest.ExitCode.USAGE_ERROR
    said = capfd.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert line in said[0]


# --- planted defects ---

FOUND_BY = {
    "peeker": {"test_what_comes_later_changes_nothing_before", "test_chance_is_not_beaten"},
    "liar": {
        "test_native_routing_is_executed",
        "test_answers_depend_on_the_request_alone",
        "test_answers_hold_in_arrangements_that_a_system_may_refuse",
    },
    "scribbler": {"test_native_routing_is_executed"},
    "breaker": {"test_experts_in_use_stay", "test_the_budget_holds"},
    "miscounter": {"test_what_was_read_is_what_was_asked_for"},
    "infinite": {"test_what_it_reports_are_finite_numbers", "test_a_live_run_gives_a_row"},
    "rememberer": {"test_requests_do_not_depend_on_each_other"},
    "bystander": {"test_requests_do_not_depend_on_each_other"},
    "residential": {"test_answers_depend_on_the_request_alone"},
    "ahead": {"test_what_is_routed_ahead_was_staged"},
    "dice": {"test_a_replay_is_the_same_twice"},
    "unmarked": {"test_hooks_are_those_of_moebench"},
    "grudge": {"test_faults_end_in_the_right_answer_or_an_error"},
    "wordy": {"test_the_smallest_budget_runs_and_a_smaller_one_is_refused"},
    "swelling": {"test_the_cap_on_memory_holds"},
    "bare": {"test_options_have_defaults_and_help"},
    "generous": {"test_files_for_another_model_are_refused"},
    "heavy": {"test_importing_it_loads_no_tensor_library"},
}


@pytest.mark.parametrize("test", sorted(set().union(*FOUND_BY.values())))
def test_a_planted_defect_is_found_by_the_test_named_for_it(lab, planted, test):
    wanted = {name for name, tests in FOUND_BY.items() if test in tests}
    _, found = suite(f"--system=plain,{','.join(sorted(wanted))}", "-k", test, lab=lab)
    failed = {name for name, outcomes in found.of.items() if test in outcomes["failed"]}
    assert failed == wanted


def test_options_are_checked_as_given(lab, planted):
    for depth, failed in (("3", set()), ("4", {"test_fidelity_is_declared"})):
        _, found = suite(
            "--system=boastful", "--system-option", f"depth={depth}", "-k", "test_fidelity_is_declared", lab=lab
        )
        assert found.of["boastful"]["failed"] == failed


def test_a_run_without_end_is_ended(planted):
    code, found = suite("--system=hung", "--system-seconds=2", "-k", "test_experts_in_use_stay")
    assert code == pytest.ExitCode.TESTS_FAILED
    assert found.of["hung"]["failed"] == {"test_experts_in_use_stay"}


def test_a_slow_system_passes_and_its_time_is_printed(lab, planted, capfd):
    code, _ = suite("--system=slow", "-k", "test_experts_in_use_stay", lab=lab)
    assert code == 0
    calls, took = re.search(r"slow: (\d+) hook calls and (\d+) us per token", capfd.readouterr().out).groups()
    assert int(took) > 2000 * int(calls) / 4


# --- the controls: what is skipped for oracles would fail ---


@pytest.mark.parametrize(("system", "options"), [("belady", {}), ("specprefetch", {"mode": "oracle"})])
def test_an_oracle_would_be_found(lab, system, options):
    spec = lab.registry.system(system)
    subject = Subject(spec, spec.config(**options), "moebench")
    trace = record(lab, subject)
    with pytest.raises(AssertionError, match="before the traces part"):
        check_causal(lab, subject, trace)
    assert chances(lab, subject, trace)["resident or on its way"].score > 2 * DEVIATIONS


def test_chance_counts_deviations():
    chance = Chance()
    for found in (1, 2, 1):
        chance.draw(found, 4, 8, 32)
    assert chance.expected == 3.0
    assert chance.score == pytest.approx(1 / (3 * 4 * 0.25 * 0.75 * 28 / 31) ** 0.5)
    nothing = Chance()
    nothing.draw(4, 4, 32, 32)
    assert nothing.score == 0.0


def test_every_planted_defect_is_looked_for():
    assert set(PLANTED) | {"heavy"} == {*FOUND_BY, "plain", "slow", "hung", "boastful"}
