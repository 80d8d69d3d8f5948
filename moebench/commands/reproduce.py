"""``moebench reproduce``: published claims, run here, and a verdict on each."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from moebench import claimfiles as published
from moebench.claims import Arm
from moebench.commands.places import writable_folder
from moebench.commands.words import parse
from moebench.config import RunConfig, option
from moebench.errors import UsageError
from moebench.plugins import Registry, load_plugins


@dataclass(frozen=True)
class ReproduceOptions:
    """Which claims are run, and where what was found goes."""

    claims: tuple[str, ...] = option(("all",), "claims by name, papers by name, or all")
    mode: Literal["model", "auto", "measure"] = option("model", "clock of the cells, as moebench run has it")
    workers: int = option(0, "modeled cells at the same time; 0: as many as processors and memory allow")
    out: str = option("results/claims", "folder that the rows of all cells go to")
    docs: str = option("", "page to write, with claims=all; the repository's is docs/claims.md")

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise UsageError(f"reproduce: workers must be at least 0, got {self.workers}")
        if self.docs and self.claims != ("all",):
            raise UsageError("docs= writes the page of all claims: it takes claims=all")
        if self.docs and self.mode != "model":
            raise UsageError("docs= writes a page that is the same everywhere: it takes mode=model")


def main(words: Sequence[str]) -> int:
    """Run what the claims need, print a table for each paper, and write rows and page."""
    options = parse(words, ReproduceOptions, "reproduce")
    if options is None:
        print(f"\npapers: {', '.join(published.names())}; a claim's name is the first column of docs/claims.md")
        return 0
    found = reproduce(options)
    from moebench.report import claims as report
    from moebench.report.plain import show

    show(report.tables(found), sys.stdout)
    print(report.counts(found))
    if options.docs:
        Path(options.docs).write_text(report.page(found))
        print(f"moebench: wrote {options.docs}", file=sys.stderr)
    print(report.document(found))
    return int(report.failed(found))


def reproduce(options: ReproduceOptions) -> list[Any]:
    """Run the arms of the chosen claims, each once; rows are written as they come. Returns judged claims."""
    from moebench import result
    from moebench.harness.evidence import evidence
    from moebench.quantities import Found
    from moebench.report.judged import judge

    chosen = published.chosen(options.claims)
    arms = {(paper.name, name): paper.arms[name] for paper, claim in chosen for name in claim.arms}
    registry = load_plugins()
    writable_folder(options.out)
    owner = {id(arm): key for key, arm in arms.items()}
    found: dict[tuple[str, str], Found] = {}
    written: set[int] = set()
    coming = evidence(list(arms.values()), lambda arm: configured(arm, options, registry), registry, options.workers)
    with closing(coming):
        for arm, got in coming:
            found[owner[id(arm)]] = got
            where = ""
            if got.row is not None and id(got.row) not in written:
                written.add(id(got.row))
                where = f", wrote {result.write(got.row, Path(options.out))}"
            print(f"{len(found)} of {len(arms)}: {arm.name}{where}", file=sys.stderr)
    return [judge(p, claim, {name: found[p.name, name] for name in claim.arms}) for p, claim in chosen]


def configured(arm: Arm, options: ReproduceOptions, registry: Registry) -> RunConfig:
    """The configuration of a cell from the words of an arm."""
    from moebench.commands.compose import typed

    plain: dict[str, Any] = {"workload": {}, "quality": {"suite": "none"}, "mode": options.mode, "out": options.out}
    for key, value in arm.options.items():
        head, _, tail = key.partition(".")
        if tail:
            plain.setdefault(head, {})[tail] = value
        elif head == "system":
            plain["system"] = {"id": value, **plain.get("system", {})}
        else:
            plain[head] = str(value) if head in ("budget", "device_budget") else value
    for needed in ("system", "hw", "model"):
        if needed not in plain:
            raise UsageError(f"arm {arm.name}: {needed} is missing")
    return typed(plain, registry)
