"""docs/adding-a-system.md, done as it says: every command and every piece of code, in a fresh environment, offline."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "adding-a-system.md").read_text()
COMMANDS = ("moebench", "pip", "python")
PART = re.compile(r"```python\n# (?P<file>\S+)\n(?P<code>.*?)```|^ {4}(?P<line>\S[^\n]*)$", re.DOTALL | re.MULTILINE)


def parts() -> list[tuple[str, str]]:
    """(file, code), or ("", command), in the order of the page."""
    found = [(part["file"] or "", part["code"] or part["line"]) for part in PART.finditer(PAGE)]
    return [(file, text) for file, text in found if file or text.split()[0] in COMMANDS]


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    """Runs a command line in an empty folder, in a virtual environment that sees what is installed here."""
    pytest.importorskip("pip")
    folder = tmp_path_factory.mktemp("adding")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
    python = folder / "env" / "bin" / "python"
    (site,) = (folder / "env" / "lib").glob("python*/site-packages")
    here = sysconfig.get_paths()["purelib"]
    (site / "here.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    environment = {**os.environ, "MOEBENCH_HOME": str(folder / "home"), "PIP_NO_INDEX": "1"}
    environment["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    del environment["MOEBENCH_PLUGINS"]
    (work := folder / "work").mkdir()
    modules = {"moebench": "moebench.cli", "pip": "pip"}

    def run(line: str) -> str:
        program, *words = shlex.split(line)
        module = [] if program == "python" else ["-m", modules[program]]
        done = subprocess.run(
            [python, *module, *words], cwd=work, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    run.work = work  # type: ignore[attr-defined]
    return run


@pytest.fixture(scope="module")
def outputs(shell):
    """What each command of the page printed."""
    printed: dict[str, str] = {}
    for file, text in parts():
        if not file:
            printed[text] = shell(text)
            continue
        target = shell.work / file
        before = target.read_text() if target.exists() else ""
        target.write_text(before.partition("@hookimpl\ndef register_systems")[0] + text)
    return printed


def output(outputs: dict[str, str], *words: str) -> str:
    """What the one command with all of these words printed."""
    (found,) = [text for line, text in outputs.items() if all(word in line.split() for word in words)]
    return found


def values(text: str, heading: str) -> list[float]:
    """The numbers of one line of a table."""
    line = next(line for line in text.splitlines() if line.startswith(heading))
    return [float(number) for number in re.findall(r"[\d.]+(?= ~)", line)]


def test_the_page_has_commands_of_each_kind():
    firsts = [" ".join(text.split()[:2]) for file, text in parts() if not file]
    assert {"moebench new-system", "pip install", "moebench compare", "moebench prepare", "python -m"} <= set(firsts)


def test_the_new_system_stands_in_the_list_and_in_the_table(outputs):
    assert re.search(r"tide +Tide .* from tide \(moebench-tide 0\.1\.0\)", output(outputs, "list"))
    assert "system.order=a number" in output(outputs, "--help")
    table = output(outputs, "compare")
    assert {"ondemand", "belady", "resident", "tide"} <= set(table.split())


def test_the_numbers_of_the_page_are_those_that_come_out(outputs):
    shown = PAGE.partition("prints two rows")[2]
    got = output(outputs, "run", "system.order=0,2")
    for heading in ("hit rate", "SSD MiB/token"):
        said = next(line.strip() for line in shown.splitlines() if line.strip().startswith(heading))
        assert values(said, heading) == values(got, heading)


def test_the_packages_own_tests_ran_and_passed(outputs):
    assert re.search(r"\b2 passed", output(outputs, "pytest", "tide"))


def test_reading_ahead_is_worth_something(outputs):
    stall = values(output(outputs, "run", "system.ahead=0,2"), "stall ms/token")
    assert stall[1] < stall[0]
    document = output(outputs, "run", "model=tinymoe").splitlines()[-1]
    assert float(re.search(r'"foreseen":([\d.]+)', document)[1]) > 4 / 32  # by chance
