"""The page in a real browser: fits a phone, draws all figures, in the dark too; complains of and fetches nothing."""

from __future__ import annotations

import pytest
from browser import CHROMIUM, Browser, chromium
from report_fixtures import HOSTILE, ROLES, failed, published, row

from moebench.report.build import Sources, build

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium, which is not installed here")


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    rows = [row("edge0"), row("lru"), row("lru", "0.1"), row("belady"), failed(), published()]
    path.write_text(build(rows, Sources(ROLES))["report.html"])
    return path


def clean(browser: Browser, page) -> None:
    """Nothing was asked for but the file itself, and the console is silent."""
    assert browser.requests == [page.as_uri()]
    assert browser.complaints == []


@pytest.mark.parametrize("width", [1280, 390])
def test_no_width_makes_the_page_scroll_sideways_and_all_figures_are_drawn(browser, page, width):
    browser.open(page, width)
    assert browser.js("document.documentElement.scrollWidth") <= width
    drawn = browser.js("document.querySelectorAll('.plot .main-svg').length / 3")  # three layers each
    assert drawn >= browser.js("document.querySelectorAll('.plot').length") > 8
    fits = "[...document.querySelectorAll('.plot')].every((p) => p.querySelector('svg').clientWidth <= p.clientWidth)"
    assert browser.js(fits)
    assert browser.js("""[...document.querySelectorAll('figure')].every((figure) => {
        const [drawn, said] = ['svg', 'figcaption'].map((name) => figure.querySelector(name).getBoundingClientRect());
        return drawn.bottom <= said.top + 1; })""")
    smallest = browser.js("""Math.min(...[...document.querySelectorAll('td, th, li, p, svg text')].map(
        (element) => parseFloat(getComputedStyle(element).fontSize)))""")
    assert smallest >= 11
    clean(browser, page)


def test_text_and_figures_are_light_on_dark_and_dark_on_light(browser, page):
    def luminance(expression: str) -> float:
        return browser.js(f"""(() => {{ const [r, g, b] = ({expression}).match(/[\\d.]+/g).map(Number);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b; }})()""")

    for dark in (False, True):
        browser.open(page, 1280, dark=dark)
        ground = luminance("getComputedStyle(document.body).backgroundColor")
        for what in ("body", "td", "figcaption"):
            text = luminance(f"getComputedStyle(document.querySelector('{what}')).color")
            assert (text > ground + 90) if dark else (text < ground - 90)
        tick = luminance("getComputedStyle(document.querySelector('.plot .xtick text')).fill")
        assert (tick > ground + 90) if dark else (tick < ground - 90)
        clean(browser, page)
    scheme = {"name": "prefers-color-scheme", "value": "light"}  # the reader changes it while the page is open
    browser.call("Emulation.setEmulatedMedia", features=[scheme])
    browser._until(lambda: luminance("getComputedStyle(document.querySelector('.plot .xtick text')).fill") < 120)


def test_without_javascript_all_tables_are_there_and_figures_say_why_they_are_not(browser, page):
    browser.open(page, 390, script=False)
    tree = browser.call("DOM.getDocument", depth=0)["root"]["nodeId"]

    def count(selector: str) -> int:
        return len(browser.call("DOM.querySelectorAll", nodeId=tree, selector=selector)["nodeIds"])

    assert count("table") > 7
    assert count(".plot") == count(".plot noscript") > 8
    assert count("svg") == 0
    clean(browser, page)


def test_hostile_names_run_nowhere(browser, tmp_path):
    bad = f"{HOSTILE}<img src=x onerror=alert(2)><a href='javascript:alert(3)'>x</a>"
    rows = [row(bad, budget, hw=bad, model=bad, workload_name=bad) for budget in ("0.1", "0.5")]
    page = tmp_path / "report.html"
    page.write_text(build(rows, Sources({}, left_out=[bad]))["report.html"])
    browser.open(page, 1280)
    assert browser.js("document.querySelectorAll('img, svg a, script').length") == browser.js(
        "document.querySelectorAll('script').length"
    )
    clean(browser, page)
