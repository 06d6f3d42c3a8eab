"""Drawings are up to date, and can be read on a phone and by people who do not see them."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import drawings
import pages
import pytest

FILES = drawings.files()
SVG = "{http://www.w3.org/2000/svg}"
PHONE = 358  # pixels that a page leaves for text on a phone 390 pixels wide
SMALLEST = 9

each_drawing = pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)


@each_drawing
def test_file_is_up_to_date(path):
    """If it is not, run ``python -m drawings`` in ``docs``."""
    assert path.read_text(encoding="utf-8") == FILES[path]


@each_drawing
def test_drawing_fits_its_frame(path):
    svg = ElementTree.fromstring(FILES[path])
    _, _, width, height = map(float, svg.get("viewBox").split())
    boxes = [box for box in svg.findall(f"{SVG}rect") if box.get("class") != "page"]
    for element in [*boxes, *svg.findall(f"{SVG}text")]:
        for axis, limit, length in (("x", width, "width"), ("y", height, "height")):
            begin = float(element.get(axis))
            assert 0 <= begin <= begin + float(element.get(length, 0)) <= limit
    for line in svg.findall(f"{SVG}polyline"):
        for point in line.get("points").split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= width and 0 <= y <= height


@each_drawing
def test_text_can_be_read_on_a_phone(path):
    svg = ElementTree.fromstring(FILES[path])
    scale = min(1, PHONE / float(svg.get("width")))
    sizes = {float(text.get("font-size")) for text in svg.iter(f"{SVG}text")}
    assert min(sizes) * scale >= SMALLEST


@each_drawing
def test_drawing_has_a_title(path):
    assert ElementTree.fromstring(FILES[path]).findtext(f"{SVG}title")


def test_pages_show_each_drawing_and_say_it_in_words():
    shown = set()
    for page in [*pages.PAGES, *pages.READMES]:
        for words, target in re.findall(r"!\[([^]]*)\]\((\S+?\.svg)\)", pages.read(page)):
            path = (page.parent / target).resolve()
            if path in FILES:
                assert len(words) > 60, f"{page} does not describe {target}"
                shown.add(path)
    assert set(FILES) == shown


def test_no_file_is_left_of_a_drawing_that_has_gone():
    (folder,) = {path.parent for path in FILES if path.parent.name == "_static"}
    assert {*folder.glob("*.svg")} - {folder / "live_view.svg"} <= set(FILES)
