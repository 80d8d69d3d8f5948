"""A table of the report: cells with number, provenance and footnote behind them; as HTML and as plain tables.

Knows no rows of results. Whatever text comes in is data and is escaped.
"""

from __future__ import annotations

import html
import re
from dataclasses import dataclass
from typing import Literal

from moebench.report.plain import Plain


@dataclass(frozen=True)
class Cell:
    """One entry: what people read, the number behind it, its provenance in a word, and a footnote."""

    text: str
    value: float | None = None
    provenance: str = ""
    note: str = ""


@dataclass(frozen=True)
class Column:
    """A heading and what stands below it. ``shown`` is text that is set like numbers; a ``marked`` number has a
    provenance, for which CSV has a column.
    """

    name: str
    kind: Literal["text", "code", "shown", "number", "marked"] = "text"

    @property
    def right(self) -> bool:
        """Whether it is set at the right."""
        return self.kind in ("shown", "number", "marked")


@dataclass(frozen=True)
class Grid:
    """A table with what is to be said of it; ``slug`` names its CSV file. The first cell of a row is its heading where
    rows are ``headed``; ``folded``: shown when opened.
    """

    slug: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str = ""
    remarks: tuple[str, ...] = ()
    headed: bool = True
    folded: bool = False

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9._-]+", self.slug):
            raise ValueError(f"a table's slug is lower-case letters, digits, points and dashes, got {self.slug!r}")
        if wrong := [row for row in self.rows if len(row) != len(self.columns)]:
            raise ValueError(f"table {self.slug}: a row of {len(wrong[0])} cells under {len(self.columns)} headings")

    @property
    def notes(self) -> dict[str, str]:
        """Footnotes with their letters, each once, in the order in which they appear."""
        found = dict.fromkeys(cell.note for row in self.rows for cell in row if cell.note)
        return {note: _letter(number) for number, note in enumerate(found)}

    @property
    def page(self) -> Plain:
        """The table for people, with footnotes."""
        notes = self.notes
        rows = tuple(
            tuple(cell.text + (f" ({notes[cell.note]})" if cell.note else "") for cell in row) for row in self.rows
        )
        lines = [f"({letter}) {note}" for note, letter in notes.items()]
        words = next((at for at, column in enumerate(self.columns) if column.right), len(self.columns))
        about = tuple(filter(None, (self.caption, *lines, *self.remarks)))
        return Plain(self.title, self._header, rows, about, words)

    @property
    def sheet(self) -> Plain:
        """The table for programs: numbers in full, empty where there is none; beside a marked number its provenance, or
        why there is none.
        """
        header: list[str] = []
        for column in self.columns:
            header += [column.name, f"{column.name}: provenance"][: 1 + (column.kind == "marked")]
        rows = []
        for row in self.rows:
            line: list[str] = []
            for column, cell in zip(self.columns, row, strict=True):
                number = column.kind in ("number", "marked")
                line.append(cell.text if not number else "" if cell.value is None else repr(cell.value))
                if column.kind == "marked":
                    line.append(cell.provenance if cell.value is not None else f"none: {cell.note}")
            rows.append(tuple(line))
        return Plain(self.title, tuple(header), tuple(rows))

    @property
    def _header(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)


def from_plain(slug: str, plain: Plain) -> Grid:
    """A plain table as one of the report."""
    columns = tuple(Column(name, "text" if at < plain.labels else "shown") for at, name in enumerate(plain.header))
    rows = tuple(tuple(Cell(text) for text in row) for row in plain.rows)
    return Grid(slug, plain.title, columns, rows, remarks=plain.notes)


def to_html(grid: Grid) -> str:
    """A captioned table that scrolls inside a frame of its own, then its footnotes."""
    notes, name = grid.notes, f"table-{grid.slug}"
    head = "".join(f'<th scope="col"{_class(column)}>{escape(column.name)}</th>' for column in grid.columns)
    lines = [
        f'<div class="frame" role="region" aria-labelledby="{name}" tabindex="0">',
        f'<table><caption id="{name}">{escape(grid.title)}</caption>',
        f"<thead><tr>{head}</tr></thead>",
        "<tbody>",
    ]
    for row in grid.rows:
        cells = []
        for number, (column, cell) in enumerate(zip(grid.columns, row, strict=True)):
            text = f"<code>{escape(cell.text)}</code>" if column.kind == "code" else escape(cell.text)
            if cell.note:
                letter = notes[cell.note]
                text += f'<sup><a href="#{name}-{letter}" aria-label="note {letter}">{letter}</a></sup>'
            heading = grid.headed and not number
            cells.append(f'<th scope="row">{text}</th>' if heading else f"<td{_class(column)}>{text}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    lines.append("</tbody></table></div>")
    if grid.caption:
        lines.append(f'<p class="caption">{escape(grid.caption)}</p>')
    if notes or grid.remarks:
        below = [f'<li id="{name}-{letter}"><b>{letter}</b> {escape(note)}</li>' for note, letter in notes.items()]
        below += [f"<li>{escape(remark)}</li>" for remark in grid.remarks]
        lines.append(f'<ul class="notes">{"".join(below)}</ul>')
    if grid.folded:
        lines = [f"<details><summary>{escape(grid.title)}</summary>", *lines, "</details>"]
    return "\n".join(lines)


def escape(text: str) -> str:
    """A text that means only itself in HTML, in attributes too."""
    return html.escape(text, quote=True)


def _class(column: Column) -> str:
    return ' class="number"' if column.right else ""


def _letter(number: int) -> str:
    """a to z, then aa, ab and so on."""
    letters, number = "", number + 1
    while number:
        number, rest = divmod(number - 1, 26)
        letters = chr(ord("a") + rest) + letters
    return letters
