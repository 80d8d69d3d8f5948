"""The pages say what the code does: every hook with its exact signature, and a plugin example that runs."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
from harness_fixtures import SHORT, mini, plugin  # noqa: F401 - fixtures

import moebench
from moebench import hookspecs
from moebench.cli import main
from moebench.engine.hooks import BROADCAST, COUNTED, FIRST_RESULT
from moebench.engine.view import View
from moebench.hookcheck import REGISTRY_HOOKS
from moebench.metrics import NAMES
from moebench.plugins import BUILTIN, load_plugins
from moebench.result import METRICS
from moebench.systemspec import Handling

ROOT = Path(__file__).parents[1]
HOOKS = {name: value for name, value in vars(hookspecs).items() if hasattr(value, "moebench_spec")}
PAGE = (ROOT / "docs" / "hooks.md").read_text()


def test_the_page_and_the_code_have_the_same_hooks_and_signatures():
    documented = re.findall(r"^### `(.+)`$", PAGE, re.MULTILINE)
    assert documented == [f"{name}{inspect.signature(hook)}" for name, hook in HOOKS.items()]


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_says_in_one_line_what_it_is(name):
    text = HOOKS[name].__doc__
    assert text
    assert "\n" not in text
    body = PAGE.partition(f"### `{name}(")[2].partition("\n#")[0].partition("\n")[2]
    assert len(body.split()) > 5


def test_the_kind_that_the_page_states_is_the_kind_of_the_code():
    once = {name for name, hook in HOOKS.items() if hook.moebench_spec["firstresult"]}
    assert once == set(FIRST_RESULT)
    assert set(HOOKS) - once == {*BROADCAST, *COUNTED, *REGISTRY_HOOKS}
    kind = ""
    for line in PAGE.splitlines():
        if line.startswith("## "):
            kind = line
        elif found := re.match(r"### `(\w+)\(", line):
            body = PAGE.partition(f"### `{found[1]}(")[2].partition("\n#")[0]
            stated = "first result" in (kind + body).lower()
            assert stated == (found[1] in once), found[1]


def test_the_page_lists_what_a_view_gives():
    listed = set(re.findall(r"`view\.(\w+)", PAGE))
    assert listed == {name for name in vars(View) if not name.startswith("_")}


def implemented(package: str) -> set[str]:
    """Hooks of the classes that a shipped system's modules hold."""
    load_plugins()
    modules = [module for name, module in sys.modules.items() if f"{name}.".startswith(f"{package}.")]
    classes = [value for module in modules for value in vars(module).values() if inspect.isclass(value)]
    methods = [(name, value) for owner in classes for name, value in inspect.getmembers(owner)]
    marked = [(name, options) for name, value in methods if (options := getattr(value, "moebench_impl", None))]
    return {options["specname"] or name for name, options in marked}


def handled(package: str) -> set[str]:
    """Fields of ``Handling`` that a shipped system's source sets."""
    folder = Path(sys.modules[package].__file__).parent
    calls = [node for file in folder.glob("*.py") for node in ast.walk(ast.parse(file.read_text()))]
    calls = [node for node in calls if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Handling"]
    return {f"Handling.{keyword.arg}" for call in calls for keyword in call.keywords}


def users() -> dict[str, list[str]]:
    """Every hook and every kind of handling -> the systems that ship and use it."""
    kinds = [*(name for name in HOOKS if name not in REGISTRY_HOOKS), *(f"Handling.{f.name}" for f in fields(Handling))]
    found: dict[str, list[str]] = {kind: [] for kind in kinds}
    for package in BUILTIN:
        specs: list = []
        register = getattr(importlib.import_module(package), "register_systems", lambda register: None)
        register(specs.append)
        for kind in (implemented(package) | handled(package)) if specs else ():
            found[kind] += [spec.id for spec in specs]
    return found


def test_every_hook_has_a_real_system_that_uses_it_and_the_table_says_which():
    assert not [kind for kind, by in users().items() if not by], "a hook that nothing uses is no hook"
    lines = [f"| `{kind}` | {', '.join(f'`{name}`' for name in by)} |" for kind, by in users().items()]
    table = PAGE.partition("## Who uses what today")[2]
    assert [line for line in table.splitlines() if line.startswith("| `")] == lines


def test_what_ships_registers_through_the_hooks_of_others():
    registered = [hook for name in BUILTIN for hook in REGISTRY_HOOKS if hasattr(importlib.import_module(name), hook)]
    assert set(registered) == set(REGISTRY_HOOKS)
    registry = load_plugins()
    for kind in ("systems", "hardware", "models", "engines"):
        assert set(getattr(registry, kind)) == {
            label.split("/")[1] for label in registry.origin if label.startswith(kind)
        }


def test_every_metric_is_defined():
    page = (ROOT / "docs" / "metrics.md").read_text().partition("| metric | definition |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (.+?) \|", page, re.MULTILINE)))) == set(METRICS)
    assert set(NAMES) <= set(METRICS)


def example() -> tuple[str, str]:
    """The README's plugin and its entry point."""
    section = (ROOT / "README.md").read_text().partition("## Add a system")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (entry,) = re.findall(r"```toml\n(.*?)```", section, re.DOTALL)
    return code, entry


def test_the_readmes_plugin_runs_as_it_stands(mini, plugin, capsys):  # noqa: F811
    code, entry = example()
    project = tomllib.loads(entry)
    assert project["project"]["entry-points"] == {"moebench": {"fifo": "fifo"}}
    assert project["tool"]["setuptools"]["py-modules"] == ["fifo"]
    plugin("fifo", code)
    assert main(["list", "systems"]) == 0
    shown = capsys.readouterr()
    assert re.search(r"fifo +First in, first out.*dist-fifo 1\.2", shown.out)
    assert shown.err == ""
    table = moebench.compare(["fifo"], model="mini", hw="m4pro", budget="0.4", **SHORT).set_index("system")
    assert table["status"]["fifo"] == "ok"
    assert table["hit_rate"]["ondemand"] < table["hit_rate"]["fifo"] < table["hit_rate"]["belady"]


def test_the_readme_lists_the_systems_that_ship():
    section = (ROOT / "README.md").read_text().partition("## Systems")[2].partition("\n## ")[0]
    listed = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.+?) \|", section, re.MULTILINE)))
    registry = load_plugins()
    assert set(listed) == {n for n in registry.systems if registry.origin[f"systems/{n}"] == "moebench"}
