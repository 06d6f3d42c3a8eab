"""The site in a browser, on a laptop and a phone, light and dark: ``nox -s site_tests``."""

from __future__ import annotations

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
