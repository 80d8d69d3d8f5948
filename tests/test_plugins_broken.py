"""A plugin that is broken costs one warning line, in every command; every other system runs, and the exit code is 0."""

from __future__ import annotations

import pytest
from harness_fixtures import plugin  # noqa: F401 - a fixture

from moebench.cli import main
from moebench.errors import UsageError
from moebench.plugins import RESERVED, load_plugins

REGISTER = """
from dataclasses import dataclass
from pathlib import Path
from moebench.hookspecs import hookimpl
from moebench.systemspec import SystemSpec

def spec(**changes):
    values = dict(id="mine", title="Mine", summary="s", make=lambda config, run: object())
    return SystemSpec(**{**values, **changes})

@dataclass(frozen=True)
class Picky:
    depth: int = 3
    def __post_init__(self):
        raise RuntimeError("no depth is deep enough")

@dataclass(frozen=True)
class Dictionary:
    weights: dict = None
    def __post_init__(self):
        object.__setattr__(self, "weights", {})

@dataclass
class Thawed:
    depth: int = 3

class Marked:
    pass

"""
SYSTEMS = REGISTER + "@hookimpl\ndef register_systems(register):\n    "
BROKEN = {  # what is wrong -> (source, a word of the warning)
    "no such module": ("import a_module_that_is_not_there", "a_module_that_is_not_there"),
    "syntax": ("def register_systems(register:", "SyntaxError"),
    "exits": ("raise SystemExit('licence expired')", "licence expired"),
    "exits silently": ("import sys; sys.exit()", "SystemExit"),
    "panics": ("class Panic(BaseException): pass\nraise Panic('rust')", "rust"),
    "empty": ("", "register_systems"),
    "not marked": (REGISTER + "def register_systems(register):\n    register(spec())", "no @hookimpl"),
    "unknown hook": (REGISTER + "@hookimpl\ndef register_system(register): pass", "did you mean register_systems"),
    "wrong argument": (REGISTER + "@hookimpl\ndef register_systems(registry): pass", "takes registry"),
    "no function": (REGISTER + "register_systems = hookimpl(Marked())", "no function"),
    "raises": (SYSTEMS + "raise ValueError('bad luck')", "bad luck"),
    "exits later": (SYSTEMS + "raise SystemExit(3)", "SystemExit"),
    "taken": (SYSTEMS + "register(spec(id='lru'))", "already registered by moebench"),
    "bad id": (SYSTEMS + "register(spec(id='My System'))", "My System"),
    "reserved id": (SYSTEMS + "register(spec(id='all'))", "all"),
    "no spec": (SYSTEMS + "register('mine')", "SystemSpec"),
    "bad default": (SYSTEMS + "register(spec(config=Picky))", "no depth is deep enough"),
    "bad option": (SYSTEMS + "register(spec(config=Dictionary))", "weights is a dict"),
    "not frozen": (SYSTEMS + "register(spec(config=Thawed))", "frozen"),
    "no fidelity": (SYSTEMS + "register(spec(fidelity=lambda config: 'good'))", "exact, advisory, altered"),
    "no handling": (SYSTEMS + "register(spec(handling=lambda config: None))", "Handling"),
    "no profile": (REGISTER + "@hookimpl\ndef register_hardware(register): register('/no/oven.yaml')", "oven.yaml"),
    "no factory": (REGISTER + "@hookimpl\ndef register_io(register): register('pigeon', 7)", "factory"),
}
QUICK = ["workload.requests=1", "workload.prompt_tokens=4", "workload.new_tokens=4", "warmup_tokens=0", "quality=none"]
REPLAY = ["hw=m4pro", "model=mixtral-8x7b", "out=out", *QUICK]
COMMANDS = {
    "list": ["list"],
    "list -v": ["list", "systems", "-v"],
    "run": ["run", "system=lru", *REPLAY],
    "run --help": ["run", "--help"],
    "compare": ["compare", "systems=lru", "baselines=false", *REPLAY],
    "doctor": ["doctor"],
    "prepare --help": ["prepare", "--help"],
    "new-system": ["new-system", "fresh"],
}


def warnings(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("moebench: warning:")]


@pytest.mark.parametrize("what", BROKEN)
def test_every_kind_of_fault_costs_one_line_and_leaves_nothing(plugin, capsys, what):  # noqa: F811
    source, word = BROKEN[what]
    plugin("broken", source)
    plugin("good", REGISTER + "@hookimpl\ndef register_systems(register):\n    register(spec(id='fine'))")
    registry = load_plugins()
    (line,) = warnings(capsys.readouterr().err)
    assert line.startswith("moebench: warning: plugin broken (dist-broken 1.2) not loaded: ")
    assert word in line
    assert "fine" in registry.systems
    assert not any(owner.startswith("broken") for owner in registry.origin.values())
    assert registry.origin["systems/lru"] == "moebench"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_goes_on(plugin, capsys, command):  # noqa: F811
    plugin("broken", BROKEN["exits"][0])
    assert main(COMMANDS[command]) == 0
    shown = capsys.readouterr()
    assert len(warnings(shown.err)) == 1
    assert "Traceback" not in shown.err
    assert shown.out


def test_a_profile_that_cannot_be_read_costs_one_line_where_it_is_shown(plugin, tmp_path, capsys):  # noqa: F811
    (tmp_path / "toaster.yaml").write_text("id: [toaster")
    source = "@hookimpl\ndef register_hardware(register):\n    register(Path(__file__).with_name('toaster.yaml'))"
    plugin("kitchen", REGISTER + source)
    assert main(["list", "hardware"]) == 0
    shown = capsys.readouterr()
    assert len(warnings(shown.err)) == 1
    assert "m4pro" in shown.out
    assert main(["run", "system=lru", *REPLAY]) == 0
    capsys.readouterr()
    assert main(["run", "system=lru", *REPLAY, "hw=toaster"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_ctrl_c_while_plugins_load_stops_everything(plugin):  # noqa: F811
    plugin("slow", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load_plugins()


def test_options_of_run_are_no_names_of_systems():
    assert {"all", "hw", "workload", "system", "model"} <= set(RESERVED)
    registry = load_plugins()
    assert not set(registry.systems) & set(RESERVED)


def test_two_packages_with_one_entry_point_name_are_told_apart(plugin, capsys):  # noqa: F811
    plugin("good", REGISTER + "@hookimpl\ndef register_systems(register):\n    register(spec())")
    plugin("twin", REGISTER + "@hookimpl\ndef register_systems(register):\n    register(spec())")
    registry = load_plugins()
    (line,) = warnings(capsys.readouterr().err)
    assert "already registered by good (dist-good 1.2)" in line
    assert registry.origin["systems/mine"].startswith("good")
    with pytest.raises(UsageError, match="unknown system"):
        registry.system("theirs")
