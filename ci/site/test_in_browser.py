"""The site in a browser, on a laptop and a phone, light and dark: ``nox -s site_tests``."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

from ci.site.accepted import ACCEPTED
from ci.site.searches import SEARCHES

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
LAPTOP, PHONE = 1280, 390


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.fail("there is neither Chromium nor Chrome: apt install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program)
        yield browser
        browser.close()


def pages(site: Path, page: Page) -> Iterator[str]:
    """Yield the name of each page while the browser shows it."""
    for path in sorted(site.rglob("*.html")):
        page.goto(path.as_uri())
        yield str(path.relative_to(site))


@pytest.mark.parametrize("width", [LAPTOP, PHONE])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_everyone_can_read_it(
    site: Path, browser: Browser, width: int, theme: Literal["light", "dark"]
) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=theme)
    axe, found = Axe(), set()
    for name in pages(site, page):
        for violation in axe.run(page).response["violations"]:
            rule = violation["id"]
            if not any(rule == known and fnmatch(name, where) for known, where, _ in ACCEPTED):
                found |= {(rule, name, node["html"][:200]) for node in violation["nodes"]}
    page.close()
    assert sorted(found) == []


@pytest.mark.parametrize("width", [LAPTOP, PHONE])
def test_no_page_scrolls_sideways(site: Path, browser: Browser, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900})
    lengths = "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    too_wide = []
    for name in pages(site, page):
        needed, there = page.evaluate(lengths)
        if needed > there:
            too_wide.append((name, needed))
    page.close()
    assert too_wide == []


@pytest.mark.parametrize("words", SEARCHES)
def test_search_shows_the_page_that_helps_first(site: Path, browser: Browser, words: str) -> None:
    page = browser.new_page()
    page.goto((site / "index.html").as_uri())
    page.get_by_placeholder("Search").fill(words)
    page.keyboard.press("Enter")
    page.locator(".search-summary", has_text="finished").wait_for()
    hits = [hit.get_attribute("href") or "" for hit in page.locator("#search-results li a").all()]
    page.close()
    first = [Path(hit.partition("#")[0]).stem for hit in hits if "glossary.html" not in hit][:1]
    assert first == [Path(SEARCHES[words][0]).name]


def test_drawings_follow_the_theme_that_a_reader_chooses(site: Path, browser: Browser) -> None:
    shown = {}
    for system in ("light", "dark"):
        page = browser.new_page(color_scheme=system)
        page.goto((site / "overview.html").as_uri())
        for chosen in ("auto", "light", "dark"):
            page.evaluate(f"document.body.dataset.theme = '{chosen}'")
            shown[system, chosen] = page.locator(".content img").first.screenshot()
        page.close()
    light, dark = shown["light", "auto"], shown["dark", "auto"]
    assert light != dark
    assert shown["light", "light"] == shown["dark", "light"] == light
    assert shown["light", "dark"] == shown["dark", "dark"] == dark


def test_button_copies_the_lines_that_a_difference_adds(site: Path, browser: Browser) -> None:
    text = (site.parent / "tutorial/step1.md").read_text(encoding="utf-8")
    differences = re.findall("^```diff\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    added = [re.findall(r"^\+(.*)", difference, re.MULTILINE) for difference in differences]
    page = browser.new_page()
    page.goto((site / "tutorial/step1.html").as_uri())
    page.evaluate("addEventListener('copy', () => window.copied = `${getSelection()}`)")
    copied = []
    for button in page.locator(".highlight-diff button").all():
        button.click()
        copied.append(page.evaluate("window.copied").splitlines())
    page.close()
    assert copied == added
    assert copied


#: Texts that cross the edge of a box, with a tenth to spare for other fonts, or that collide with
#: another text or a line.
OUT_OF_PLACE = """() => {
  const boxes = [...document.querySelectorAll("rect")].map((rect) => rect.getBBox()).reverse();
  const boxAt = (x, y) => boxes.findIndex((box) => box.x < x && x < box.x + box.width
                                                && box.y < y && y < box.y + box.height);
  const spare = {start: [0, 0.1], middle: [0.05, 0.05], end: [0.1, 0]};
  const texts = [...document.querySelectorAll("text")].map((text) => {
    const {x, y, width, height} = text.getBBox();
    const [before, after] = spare[text.getAttribute("text-anchor")];
    return {words: text.textContent, left: x - before * width, right: x + (1 + after) * width,
            top: y + 1, bottom: y + height - 1};
  });
  const crosses = ({left, right, top, bottom}) => new Set(
    [left, (left + right) / 2, right].flatMap((x) => [boxAt(x, top), boxAt(x, bottom)])).size > 1;
  const meet = (a, b) => a !== b && a.left < b.right && b.left < a.right
                         && a.top < b.bottom && b.top < a.bottom;
  const points = [...document.querySelectorAll("polyline")].flatMap((line) => Array.from(
    {length: line.getTotalLength() / 2}, (_, step) => line.getPointAtLength(2 * step)));
  const isOn = (point, text) => text.left < point.x && point.x < text.right
                                && text.top < point.y && point.y < text.bottom;
  return texts.filter((text) => crosses(text) || texts.some((other) => meet(text, other))
                                || points.some((point) => isOn(point, text)))
              .map((text) => text.words);
}"""


def test_text_of_drawings_stays_in_its_place(site: Path, browser: Browser) -> None:
    page = browser.new_page()
    out_of_place = {}
    for path in (site / "_static").glob("*.svg"):
        page.goto(path.as_uri())
        if page.locator("rect.page").count():
            out_of_place[path.name] = page.evaluate(OUT_OF_PLACE)
    page.close()
    assert {name: words for name, words in out_of_place.items() if words} == {}
    assert len(out_of_place) > 10
