"""Pages in a headless Chromium: all is drawn and fits, nothing is fetched, nothing of the text is run. Needs ``.[browser]``."""

import re
import shutil

import pytest
from reports import HOSTILE, train

from agents import cli

pytestmark = pytest.mark.browser
QUIET = "--no-sandbox --headless --disable-gpu --no-first-run --disable-background-networking --disable-component-update --disable-sync"
WIDTHS, SCHEMES = (400, 1600), ("light", "dark")


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium on this machine")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=QUIET.split())
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A report of two runs, learned and given, and a heat map."""
    folder = tmp_path_factory.mktemp("pages")
    learned, given = train(folder / "learned"), train(folder / "given", "agent=uniform", updates=4)
    assert cli.main(["report", str(learned), str(given), "--out", str(folder / "report.html"), "--bytes", "1024"]) == 0
    text = HOSTILE.replace(b"\0", b"\x01").decode("utf-8", "surrogateescape")
    assert cli.main(["segment", str(learned), text, "--html", str(folder / "map.html")]) == 0
    return folder


@pytest.fixture(params=[(width, scheme) for width in WIDTHS for scheme in SCHEMES], ids=lambda each: f"{each[0]}-{each[1]}")
def visit(request, browser, pages, tmp_path):
    """Open a page, which must say nothing on the console and ask for nothing but itself."""
    width, scheme = request.param
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    heard: list[str] = []

    def open_page(name):
        page, url = context.new_page(), (pages / name).as_uri()
        page.on("console", lambda message: heard.append(message.text))
        page.on("pageerror", lambda error: heard.append(str(error)))
        page.on("request", lambda asked: heard.append(asked.url) if asked.url != url else None)
        page.goto(url)
        page.screenshot(path=tmp_path / f"{name}.png", full_page=True)  # to look at: pytest --basetemp=FOLDER
        return page

    yield open_page
    assert heard == []
    context.close()


def boxes(page, selector):
    return page.evaluate("s => [...document.querySelectorAll(s)].map(e => e.getBoundingClientRect().toJSON())", selector)


def test_the_report_is_drawn_and_fits(visit):
    page = visit("report.html")
    wide = page.viewport_size["width"]
    assert page.evaluate("document.documentElement.scrollWidth") <= wide
    charts, histograms, maps = (boxes(page, f"figure.{kind}") for kind in ("chart", "histogram", "map"))
    assert (len(charts), len(histograms), len(maps)) == (8, 2, 6 + 1)
    for box in (*charts, *histograms, *maps, *boxes(page, "figure > svg")):
        assert box["width"] >= 200 and box["height"] >= 60 and box["left"] >= 0 and box["right"] <= wide + 1, box
    assert all(box["width"] > 0 or box["height"] > 0 for box in boxes(page, "svg path.curve"))
    assert all(box["height"] > 8 and box["width"] > 1 for box in boxes(page, ".heat .c"))
    texts = [box["height"] for box in boxes(page, "figure svg text")]
    assert min(texts) >= 7.5, "readable"
    beside = len({round(box["left"]) for box in charts})
    assert beside == (1 if wide == 400 else 4)


def test_light_and_dark_are_read_well(visit):
    """Contrast of every kind of text with what is behind it: at least 4.5 to 1 (WCAG AA)."""
    page = visit("report.html")

    def colours(selector):
        script = "s => { const e = document.querySelector(s), c = getComputedStyle(e); return [c.color, c.fill] }"
        return page.evaluate(script, selector)

    behind = page.evaluate("getComputedStyle(document.body).backgroundColor")
    dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    assert (_luminance(behind) < 0.05) == dark
    for selector in ("h1", ".lead", ".soft", "footer", "th small", "td", "code", ".keys li"):
        assert _contrast(colours(selector)[0], behind) >= 4.5, selector
    assert _contrast(colours("svg text")[1], behind) >= 4.5
    deepest = page.evaluate("getComputedStyle(document.body).getPropertyValue('--warmth')")
    tinted = _over([float(part) for part in deepest.split()], _channels(behind), 0.4)
    assert _contrast(colours(".heat .c")[0], f"rgb({tinted[0]}, {tinted[1]}, {tinted[2]})") >= 4.5


@pytest.mark.parametrize("name", ["report.html", "map.html"])
def test_text_is_shown_not_run(visit, name):
    page = visit(name)
    assert page.title() not in ("owned", "")
    assert page.evaluate("document.querySelectorAll('script, img, b b, [onerror]').length") == 0
    shown = page.evaluate("document.querySelector('.heat').innerText")
    assert "<script>" in page.inner_text("main") and "\\u202e" in page.inner_text("main")
    assert not re.search("[\u202a-\u202e\0\x01]", shown)
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]


def test_scripts_of_both_directions_are_read_in_theirs(visit):
    """In a line that begins in Latin the Hebrew word stands on its own, its first letter to the right of its last."""
    page = visit("map.html")
    places = page.evaluate("[...document.querySelectorAll('.heat .c')].map(e => [e.textContent, e.getBoundingClientRect().left])")
    word = "שלום"
    texts = [text for text, _ in places]
    first = next(n for n in range(len(texts)) if texts[n : n + len(word)] == list(word))
    lefts = [left for _, left in places[first : first + len(word)]]
    assert lefts == sorted(lefts, reverse=True) and len(set(lefts)) == len(word)


def _channels(colour):
    return [float(part) for part in re.findall(r"[\d.]+", colour)[:3]]


def _over(above, below, opacity):
    return [opacity * a + (1 - opacity) * b for a, b in zip(above, below, strict=True)]


def _luminance(colour):
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in (each / 255 for each in _channels(colour))]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one, other):
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)
