"""Plain tables: a title, a header, rows of text and notes, written for a terminal, as CSV or as Markdown.

What is in a cell may come from a model, a plugin or a file, so each form escapes what it would read as its own. Knows
no metric and no row of results.
"""

from __future__ import annotations

import csv
import io
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.cells import cell_len

from moebench.errors import UsageError

FORMATS = ("text", "csv", "markdown")
GAP = "  "
FORMULA = ("=", "+", "-", "@")  # what a spreadsheet would compute


@dataclass(frozen=True)
class Plain:
    """One table. The first ``labels`` columns are words, the others numbers; every row is as long as the header. Where
    a table is too wide for a terminal, its first ``repeat`` columns say in each part which line is which.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    labels: int = 1
    repeat: int = 0  # 0: all columns of words

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.header):
                raise ValueError(f"table {self.title}: a row of {len(row)} cells under {len(self.header)} headings")


def show(tables: Sequence[Plain], stream: TextIO, width: int | None = None) -> None:
    """Print tables for people. Where columns of numbers do not all fit, those left over follow below, beside the words
    again; no cell is wrapped or cut, even where one is wider than the terminal.
    """
    width = width or shutil.get_terminal_size().columns
    for plain in tables:
        columns = [_column(plain, number) for number in range(len(plain.header))]
        words, rest = columns[: plain.labels], columns[plain.labels :]
        lines = [plain.title]
        while True:
            part, rest = [*words, *rest[:1]], rest[1:]
            while rest and sum(map(_width, [*part, rest[0]])) <= width + len(GAP):
                part.append(rest.pop(0))
            joined = (GAP.join(cells).rstrip() for cells in zip(*part, strict=True))
            lines += [line for line in joined if line]
            if not rest:
                break
            words = columns[: plain.repeat or plain.labels]
            lines.append("")
        stream.write("\n".join([*lines, *plain.notes, "", ""]))


def _column(plain: Plain, number: int) -> list[str]:
    """One column's lines, all as wide as the widest: the heading, a rule and the cells."""
    cells = [" ".join(row[number].split()) for row in plain.rows]
    heading = [plain.header[number]] if number < plain.labels else plain.header[number].split(" ")
    tallest = max([1, *(len(name.split(" ")) for name in plain.header[plain.labels :])])
    lines = [""] * (tallest - len(heading)) + heading
    size = max(map(cell_len, [*lines, *cells]))
    lines += ["─" * size, *cells]
    pad = [" " * (size - cell_len(line)) for line in lines]
    return [line + p if number < plain.labels else p + line for line, p in zip(lines, pad, strict=True)]


def _width(column: Sequence[str]) -> int:
    return cell_len(column[0]) + len(GAP)


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
    text = " ".join(text.split())
    try:
        float(text)
    except ValueError:
        return "'" + text if text.startswith(FORMULA) and text != "-" else text
    return text
