"""``moebench summary``: the scores of result files, one line for each dataset and one column for each system."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from moebench.commands.words import parse
from moebench.config import option
from moebench.errors import UsageError


@dataclass(frozen=True)
class SummaryOptions:
    """Which results, and how the summary is written."""

    results: tuple[str, ...] = option(("results",), "result files, or folders of them")
    format: Literal["text", "csv", "markdown"] = option("text", "tables for people, one table as CSV, or Markdown")


def main(words: Sequence[str]) -> int:
    """Read, summarise, print."""
    options = parse(words, SummaryOptions, "summary")
    if options is None:
        return 0
    from moebench import results
    from moebench.report import plain, summary
    from moebench.result import SCHEMA

    rows = results.read(options.results)
    if not any(row.quality for row in rows):
        raise UsageError(
            f"no row of {', '.join(options.results)} has scores: run with a quality suite and a model that answers"
        )
    sheet = summary.sheet(rows)
    plain.print_as(options.format, summary.summary(rows), sheet, sys.stdout)
    if options.format == "text":
        lines = [dict(zip(sheet.header, line, strict=True)) for line in sheet.rows]
        print(json.dumps({"schema": SCHEMA, "summary": lines}, separators=(",", ":")))
    return 0
