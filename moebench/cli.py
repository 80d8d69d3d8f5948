"""The dispatcher: picks one command module, runs it, and turns what goes wrong into one line and an exit code."""

from __future__ import annotations

import importlib
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from moebench.commands.words import respell
from moebench.errors import UsageError, unknown

COMMANDS = {
    "run": "run one system on one machine with one workload; -m sweeps",
    "compare": "run several systems beside a floor, baselines and an oracle",
    "ladder": "where a system's loss comes from, one change at a time",
    "reproduce": "published claims, run here: published, ours, ratio and verdict",
    "summary": "scores of result files, a line per dataset and a column per system",
    "report": "one self-contained page from result files, with tables as Markdown and CSV",
    "regress": "current results against a baseline, for CI; or where a history changed",
    "list": "systems, hardware, models and engines that can be named",
    "doctor": "what this machine can measure, and what is missing",
    "pack": "turn a model folder into an expert pack",
    "model": "make a model folder: random weights of any geometry, or a small real model of experts",
    "prepare": "fit or import what a system brings to a model, such as trained heads",
    "calibrate": "measure this machine into hw=host",
    "validate": "the same cells measured here and modeled: how far forecasts are off",
    "new-system": "write a plugin package with a system of your own, ready to install",
    "trace": "import, record, synthesize and describe routing traces",
}


def usage() -> str:
    """The text of ``moebench --help``."""
    lines = [
        "usage: moebench COMMAND [KEY=VALUE ...]",
        "",
        *(f"  {name:<10} {text}" for name, text in COMMANDS.items()),
    ]
    return "\n".join(
        [*lines, "", "moebench COMMAND --help shows a command's options; debug=true shows tracebacks.", ""]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns 0 for done, 1 for a failed run, 2 for wrong use."""
    words = respell(sys.argv[1:] if argv is None else argv)
    debug = "debug=true" in words
    try:
        with _stopped_alike():
            return _dispatch(words)
    except KeyboardInterrupt as stop:
        return _fail(str(stop) or "stopped by Ctrl-C", 1)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output is gone: nobody is left to tell
        return 1
    except UsageError as error:
        if debug:
            traceback.print_exc()
        return _fail(str(error), 2)
    except Exception as error:
        if debug:
            traceback.print_exc()
        from moebench.harness.blame import reason

        return _fail(reason(error), 1)


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(usage(), end="")
        return 0 if words else 2
    if words[0] == "--version":
        from moebench.version import __version__

        print(f"moebench {__version__}")
        return 0
    if words[0] not in COMMANDS:
        raise unknown("command", words[0], COMMANDS)
    module = importlib.import_module(f"moebench.commands.{words[0].replace('-', '_')}")
    return int(module.main(words[1:]))


@contextmanager
def _stopped_alike() -> Iterator[None]:
    """Inside, being asked to end and a terminal that goes away are what Ctrl-C is, so that nothing is left behind."""

    def stop(number: int, _: object) -> None:
        raise KeyboardInterrupt(f"stopped by {signal.Signals(number).name}")

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
                before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _fail(message: str, code: int) -> int:
    line = " ".join(message.split())  # names in it may come from a file that somebody else wrote
    print("moebench: error: " + "".join(c if c.isprintable() else "?" for c in line), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
