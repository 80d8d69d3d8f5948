"""Plain tables: a title, a header, rows of text and notes, written for a terminal, as CSV or as Markdown.

What is in a cell may come from a model, a plugin or a file, so each form escapes what it would read as its own. Knows
no metric and no row of results.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TextIO

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moebench.errors import UsageError

FORMATS = ("text", "csv", "markdown")
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what a spreadsheet would compute


@dataclass(frozen=True)
class Plain:
    """One table. The first ``labels`` columns are words, the others numbers; every row is as long as the header."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    labels: int = 1

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.header):
                raise ValueError(f"table {self.title}: a row of {len(row)} cells under {len(self.header)} headings")


def show(tables: Sequence[Plain], stream: TextIO, width: int | None = None) -> None:
    """Print tables for people. Cells wrap between words where the terminal is narrow; no word is broken or cut, even
    where that makes a line longer than the terminal is wide.
    """
    for plain in tables:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for number, name in enumerate(plain.header):
            cells, word = [row[number] for row in plain.rows], number < plain.labels
            parts = [part for text in (name, *cells) for part in text.split()] if word else [*name.split(), *cells]
            heading = Text(name if word else name.replace(" ", "\n"))
            justify: Literal["left", "right"] = "left" if word else "right"
            table.add_column(heading, justify=justify, no_wrap=not word, min_width=max(map(cell_len, parts), default=0))
        for row in plain.rows:
            table.add_row(*map(Text, row))
        console = Console(file=stream, width=width, highlight=False)
        console.width = max(console.width, sum((column.min_width or 0) + 2 for column in table.columns))
        console.print(Text(plain.title), table, *(Text(line) for line in plain.notes), Text(), sep="\n")


def to_markdown(tables: Sequence[Plain]) -> str:
    """Markdown tables with their titles as paragraphs and notes as lists."""
    parts = []
    for plain in tables:
        rule = ["---" if number < plain.labels else "---:" for number in range(len(plain.header))]
        lines = [_line(plain.header), "| " + " | ".join(rule) + " |", *map(_line, plain.rows)]
        notes = [f"- {_markdown(note)}" for note in plain.notes]
        parts.append("\n".join([f"**{_markdown(plain.title)}**", "", *lines, *(["", *notes] if notes else [])]))
    return "\n\n".join(parts) + "\n"


def to_csv(plain: Plain) -> str:
    """One table as CSV, with a leading apostrophe before text that a spreadsheet would compute."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(map(_safe, plain.header))
    writer.writerows([_safe(cell) for cell in row] for row in plain.rows)
    return stream.getvalue()


def print_as(form: str, tables: Sequence[Plain], sheet: Plain, stream: TextIO) -> None:
    """Print in one of ``FORMATS``; CSV holds ``sheet``, which says in one table what the others say in several."""
    if form not in FORMATS:
        raise UsageError(f"format={form} is not one of {', '.join(FORMATS)}")
    if form == "text":
        show(tables, stream)
    else:
        stream.write(to_csv(sheet) if form == "csv" else to_markdown(tables))


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(_markdown, cells)) + " |"


def _markdown(text: str) -> str:
    """Text that Markdown shows as it is: no cell, code, tag, emphasis or link begins in it."""
    plain = " ".join(text.split()).replace("\\", "\\\\").replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([|`*]|(?<=\])\()", r"\\\1", plain)


def _safe(text: str) -> str:
    try:
        float(text)
    except ValueError:
        return "'" + text if text.startswith(FORMULA) and text != "-" else text
    return text
