"""The pytest plugin: options of the suite, its fixtures and what it says at the end. Imports moebench when used."""

from __future__ import annotations

from typing import Any

import pytest

SUITE = "moebench.testing."
SUBJECTS: Any = pytest.StashKey()
LAB: Any = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Which system, with which options."""
    group = parser.getgroup("moebench", "conformance of a moebench system (pytest --pyargs moebench.testing)")
    group.addoption("--system", metavar="ID", help="the system to check; several with commas, or all")
    group.addoption(
        "--system-option", metavar="NAME=VALUE", action="append", default=[], help="an option of the system; repeatable"
    )
    group.addoption(
        "--system-seconds", metavar="S", type=float, default=120.0, help="a run that takes longer has failed [120]"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Find the systems before anything is collected: what cannot be is one line."""
    config.stash[SUBJECTS], config.stash[LAB] = [], None
    wanted = config.getoption("--system")
    if wanted is None:
        return
    from moebench.errors import UsageError
    from moebench.plugins import load_plugins
    from moebench.testing.subject import subjects

    try:
        config.stash[SUBJECTS] = subjects(wanted, config.getoption("--system-option"), load_plugins())
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every test of the suite runs for every system."""
    if metafunc.module.__name__.startswith(SUITE) and "subject" in metafunc.fixturenames:
        found = metafunc.config.stash[SUBJECTS]
        metafunc.parametrize("subject", found, ids=[subject.name for subject in found], scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a system there is nothing to check."""
    if not config.stash[SUBJECTS] and any(item.nodeid and _module(item).startswith(SUITE) for item in items):
        raise pytest.UsageError("which system? --system=ID, several with commas, or --system=all")


def _module(item: pytest.Item) -> str:
    return getattr(getattr(item, "module", None), "__name__", "")


@pytest.fixture(scope="session")
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The embedded model, loaded once, on poisoned memory."""
    from moebench.testing.lab import Lab

    stash = request.config.stash
    if stash[LAB] is None:
        stash[LAB] = Lab(tmp_path_factory.mktemp("moebench"), request.config.getoption("--system-seconds"))
    return stash[LAB]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """What the hooks of each system cost, and advice."""
    found: list[Any] = config.stash.get(SUBJECTS, [])
    if not found:
        return
    from moebench.testing.summary import advice, overhead

    lines = [line for subject in found for line in (*overhead(config.stash[LAB], subject), *advice(subject))]
    if lines:
        terminalreporter.section("moebench systems")
        for line in lines:
            terminalreporter.write_line(line)
