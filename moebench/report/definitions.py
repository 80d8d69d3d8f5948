"""What the numbers mean, as ``docs/metrics.md`` says it: that page travels with the package, and is read here.

Knows the little Markdown that the page uses: a table, paragraphs, bold and code.
"""

from __future__ import annotations

import re
from importlib import resources

from moebench.report.grid import Cell, Column, Grid, escape


def _blocks() -> list[str]:
    text = resources.files("moebench.report").joinpath("metrics.md").read_text(encoding="utf-8")
    return [block.strip() for block in text.split("\n\n") if block.strip()]


def definitions(slug: str) -> Grid:
    """The table of metrics with their definitions."""
    (table,) = [block for block in _blocks() if block.startswith("| metric |")]
    rows = []
    for line in table.splitlines()[2:]:
        name, text = (part.strip() for part in line.strip("|").split("|", 1))
        rows.append((Cell(_bare(name)), Cell(_bare(text))))
    return Grid(slug, "Metrics", (Column("metric"), Column("definition")), tuple(rows))


def paragraphs() -> list[str]:
    """Everything else on the page, as HTML paragraphs."""
    return [f"<p>{_inline(block)}</p>" for block in _blocks() if not block.startswith(("#", "|"))]


def prose() -> str:
    """Everything else on the page, as Markdown."""
    return "\n\n".join(block for block in _blocks() if not block.startswith(("#", "|")))


def _bare(text: str) -> str:
    return text.replace("`", "").replace("**", "").replace("\\|", "|")


def _inline(block: str) -> str:
    text = escape(" ".join(block.split()))
    text = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", text)
    text = re.sub(r"(?<![\w*])\*(\w[^*]*?)\*(?![\w*])", r"<em>\1</em>", text)
    return re.sub(r"`(.+?)`", r"<code>\1</code>", text)
