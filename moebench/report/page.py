"""The one HTML file: sections with tables and figures, plotly, style and script inside, and no address to fetch.

A policy in its head forbids the browser every request. Knows grids and figures; knows no rows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from moebench.report.figure import Figure
from moebench.report.grid import Grid, escape, to_html

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
NAMES = ("www.w3.org",)  # of these addresses a script needs the name alone, as that of a format


@dataclass(frozen=True)
class Section:
    """A chapter (level 2) or a part of one (level 3). ``text`` is plain, ``html`` and ``markdown`` are not."""

    slug: str
    title: str
    level: int = 2
    text: str = ""
    html: str = ""
    markdown: str = ""
    grids: tuple[Grid, ...] = ()
    figures: tuple[Figure, ...] = ()


def page(title: str, head: Sequence[str], sections: Sequence[Section], script: bool) -> str:
    """The whole document. ``head`` are lines below the title; ``script``: figures are in it, so plotly has to be."""
    inside = "\n".join(_section(section) for section in sections)
    facts = "\n".join(f'<p class="facts">{escape(line)}</p>' for line in head)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>
{_own("page.css")}</style>
<noscript><style>.plot {{ height: auto !important; min-height: 0; }}</style></noscript>
</head>
<body>
<a class="skip" href="#content">Skip to the tables</a>
<header>
<h1>{escape(title)}</h1>
{facts}
</header>
<nav aria-label="Contents">
{_contents(sections)}
</nav>
<main id="content">
{inside}
</main>
<footer><p>Written by moebench. Everything in this file stands in it: it fetches nothing.</p></footer>
{_scripts() if script else ""}</body>
</html>
"""


def _section(section: Section) -> str:
    parts = [f'<h{section.level} id="{section.slug}">{escape(section.title)}</h{section.level}>']
    parts += [f"<p>{escape(section.text)}</p>" if section.text else "", section.html]
    parts += [to_html(grid) for grid in section.grids]
    plain = [_figure(figure) for figure in section.figures if not figure.folded]
    if plain:
        parts.append(f'<div class="figures">{"".join(plain)}</div>')
    for number, figure in enumerate(figure for figure in section.figures if figure.folded):
        parts.append(
            f"<details{' open' * (not number)}><summary>{escape(figure.title)}</summary>{_figure(figure)}</details>"
        )
    return "\n".join(filter(None, parts))


def _figure(figure: Figure) -> str:
    heading = "" if figure.folded else f"<h4>{escape(figure.title)}</h4>"
    numbers = "its events stand in the trace beside this file" if figure.folded else "its numbers stand in the tables"
    return (
        f'<figure id="figure-{figure.slug}">{heading}'
        f'<div class="plot" id="plot-{figure.slug}" data-figure="data-{figure.slug}" role="img" '
        f'aria-label="{escape(figure.alt)}" style="height:{figure.height}px">'
        f"<noscript>This figure needs JavaScript; {numbers}.</noscript></div>"
        f"<figcaption>{escape(figure.caption)}</figcaption>"
        f'<script type="application/json" id="data-{figure.slug}">{figure.json}</script></figure>'
    )


def _contents(sections: Sequence[Section]) -> str:
    return (
        "<ul>"
        + "".join(f'<li><a href="#{s.slug}">{escape(s.title)}</a></li>' for s in sections if s.level == 2)
        + "</ul>"
    )


def _scripts() -> str:
    from plotly.offline import get_plotlyjs

    return f"<script>{_without_addresses(get_plotlyjs())}</script>\n<script>\n{_own('page.js')}</script>\n"


def _without_addresses(script: str) -> str:
    """The library without the addresses that it names, of map tiles, of its maker and in its comments."""
    kept = "|".join(map(re.escape, NAMES))
    return re.sub(rf"https?://(?!{kept})", "about:blank#", script)


def _own(name: str) -> str:
    return resources.files("moebench.report").joinpath(name).read_text(encoding="utf-8")
