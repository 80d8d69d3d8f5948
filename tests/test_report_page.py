"""The page is well formed, fetches nothing, is the same bytes for the same rows, and shows every text as text."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
from html.parser import HTMLParser

import pytest
from report_fixtures import HOSTILE, ROLES, comparison, failed, metrics, row

from moebench.report.build import Sources, build
from moebench.report.definitions import definitions
from moebench.report.page import _without_addresses
from moebench.result import METRICS

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Reader(HTMLParser):
    """Checks nesting, collects ids, links, tags and what scripts hold."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["script"]:
            self.scripts.append(data)
        else:
            self.text.append(data)


@pytest.fixture(scope="module")
def files():
    return build(comparison(), Sources(ROLES))


@pytest.fixture(scope="module")
def page(files):
    return Reader(files["report.html"])


def test_every_id_is_there_once_and_every_link_stays_inside(page):
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids)) > 20
    for tag, attrs in page.tags:
        if tag == "a":
            assert attrs["href"].startswith("#")
            assert attrs["href"][1:] in ids
        for pointer in ("aria-labelledby", "data-figure"):
            assert pointer not in attrs or attrs[pointer] in ids


def test_no_outside_address_is_in_the_file(files, page):
    addresses = set(re.findall(r"https?://([^/\"'`\s]+)", files["report.html"]))
    assert addresses <= {"www.w3.org"}  # names of formats, which no browser fetches
    assert not [attrs for _, attrs in page.tags if "src" in attrs]
    policy = next(attrs["content"] for _, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")


def test_names_of_formats_stay_in_the_library():
    assert _without_addresses('a="http://www.w3.org/2000/svg";b="https://x.org/y"') == (
        'a="http://www.w3.org/2000/svg";b="about:blank#x.org/y"'
    )


def test_tables_say_which_cells_are_headings_and_can_be_reached(page):
    assert all(attrs.get("scope") in ("col", "row") for tag, attrs in page.tags if tag == "th")
    frames = [attrs for _, attrs in page.tags if attrs.get("class") == "frame"]
    assert frames
    assert all(frame["tabindex"] == "0" and frame["role"] == "region" for frame in frames)
    assert len([tag for tag, _ in page.tags if tag == "caption"]) == len(
        [tag for tag, _ in page.tags if tag == "table"]
    )
    plots = [attrs for _, attrs in page.tags if attrs.get("class") == "plot"]
    assert plots
    assert all(plot["role"] == "img" and plot["aria-label"] for plot in plots)
    assert len([tag for tag, _ in page.tags if tag == "figcaption"]) == len(plots)


def test_the_same_rows_give_the_same_bytes_in_any_order(files):
    assert build(comparison()[::-1], Sources(ROLES)) == files
    other = comparison()
    other[0] = dataclasses.replace(other[0], metrics=metrics(5.0, 1.4))
    assert build(other, Sources(ROLES)) != files


def test_every_table_of_the_page_is_in_markdown_and_csv(files, page):
    titles = re.findall(r"<caption[^>]*>([^<]*)</caption>", files["report.html"])
    assert len(titles) == len([name for name in files if name.endswith(".csv")])
    for title in titles:
        assert f"**{title}**" in files["report.md"]


def test_a_failed_row_stays_with_its_error_and_is_in_no_picture(files, page):
    assert "lfu: failed" in "".join(page.text)
    assert "failed: the disk is full" in "".join(page.text)
    assert "1 row failed" in files["report.md"]
    figures = [text for text in page.scripts if text.startswith('{"data"')]
    assert figures
    assert not any("lfu" in json.dumps(json.loads(text)) for text in figures)


def test_every_metric_has_its_definition_on_the_page(page):
    told = " ".join(cell.text for line in definitions("x").rows for cell in line[:1])
    missing = [name for name in METRICS if name not in told]
    assert not missing


# --- strings that come from outside ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hostile():
    """Every text of a row that a config, a model or a plugin can set."""
    bad = row(HOSTILE, hw=HOSTILE, model=HOSTILE)
    steps = {**bad.details["timeline"], "lanes": [HOSTILE, "storage"]}
    steps["events"] = [[0, HOSTILE, 0.0, 5.0], [1, HOSTILE, 2.0, 9.0]]
    bad = dataclasses.replace(
        bad, workload_name=HOSTILE, fidelity=HOSTILE, assumptions=(HOSTILE, f"={HOSTILE}"),
        environment={"commit": HOSTILE, "python": HOSTILE, "packages": {HOSTILE: HOSTILE}},
        workload={"kind": "prompts", "seed": 0, "hash": HOSTILE}, details={**bad.details, "timeline": steps},
        config={**bad.config, "system": {"id": HOSTILE, HOSTILE: HOSTILE}},
    )  # fmt: skip
    other = dataclasses.replace(bad, config={**bad.config, "budget": "0.5"}, metrics=metrics(7.0, 3.0, -1.0))
    gone = failed(f"={HOSTILE}", f"={HOSTILE}", hw=HOSTILE, model=HOSTILE)
    commands = {bad.id: f"moebench run {HOSTILE}"}
    return build([bad, other, gone], Sources({HOSTILE: "oracle"}, commands, {}, {HOSTILE: HOSTILE}, [HOSTILE]))


def test_no_text_of_a_row_becomes_a_tag_or_a_script(hostile):
    page = Reader(hostile["report.html"])
    assert "<script>alert(1)" not in hostile["report.html"]
    kinds = [attrs.get("type", "") for tag, attrs in page.tags if tag == "script"]
    assert set(kinds) == {"application/json", ""}
    assert kinds.count("") == 2  # the library and the page's own
    assert HOSTILE in "".join(page.text)
    assert not [attrs for _, attrs in page.tags if any(name.startswith("on") for name in attrs)]


def test_no_text_of_a_row_becomes_a_tag_inside_a_figure(hostile):
    figures = [json.loads(text) for text in Reader(hostile["report.html"]).scripts if text.startswith('{"data"')]
    assert len(figures) > 5

    def texts(value):
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            for part in value.values() if isinstance(value, dict) else value:
                yield from texts(part)

    found = list(texts(figures))
    assert any("&lt;script" in text for text in found)
    assert not [text for text in found if re.search(r"<(?!/?b>|br>|/?extra>)", text)]


def test_no_text_of_a_row_becomes_a_formula_or_a_column(hostile):
    for name, text in hostile.items():
        if name.endswith(".csv"):
            lines = list(csv.reader(io.StringIO(text)))
            assert len({len(line) for line in lines}) == 1
            for cell in (cell for line in lines for cell in line):
                assert not cell.startswith(("=", "+", "@", "\t")), (name, cell)


def test_no_text_of_a_row_breaks_a_markdown_table_or_is_a_tag(hostile):
    tables = re.findall(r"(?:^\|.*\n)+", hostile["report.md"], re.M)
    assert len(tables) > 5
    for table in tables:
        widths = {len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in table.strip().split("\n")}
        assert len(widths) == 1, table
    assert not re.search(r"(?<!\\)<script", hostile["report.md"])


def test_timeline_names_are_data(hostile):
    found = json.loads(hostile["report.timeline.json"])
    assert any(event["name"] == HOSTILE for event in found["traceEvents"])


def test_names_of_machines_and_models_cannot_clash_with_those_of_sections():
    names = [
        ("m4pro", "tiny"),
        ("m4pro", "tiny-steps"),
        ("m4pro", "tiny.steps"),
        ("hardware", "m4pro"),
        ("M4PRO", "tiny"),
    ]
    files = build([row("lru", hw=hw, model=model) for hw, model in names], Sources())
    page = Reader(files["report.html"])
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert len([name for name in files if name.endswith(".csv")]) == files["report.html"].count("<caption")


def test_a_report_without_figures_has_no_library():
    page = build([failed()], Sources())["report.html"]
    assert len(page) < 100_000
    assert "the disk is full" in page
    Reader(page)
