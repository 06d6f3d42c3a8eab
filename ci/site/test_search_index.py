"""The site's search finds what people search for, in the section that helps.

A comment ``<!-- search: WORDS -->`` on a page puts the section at the top of the search's results.
"""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from ci.site.searches import SEARCHES


@pytest.fixture(scope="module")
def index(site: Path) -> dict[str, Any]:
    script = (site / "searchindex.js").read_text(encoding="utf-8")
    return dict(json.loads(script.removeprefix("Search.setIndex(").removesuffix(")")))


@pytest.mark.parametrize("words", SEARCHES)
def test_words_lead_to_the_section(site: Path, index: dict[str, Any], words: str) -> None:
    page, heading = SEARCHES[words]
    places = index["indexentries"].get(words.lower(), [])
    first = {index["docnames"][number]: anchor for number, anchor, is_main in places if is_main}
    assert first.keys() - {"glossary"} == {page}
    above, found, _ = (site / f"{page}.html").read_text("utf-8").partition(f'id="{first[page]}"')
    assert found
    *_, nearest = re.findall(r"<h\d>(.+?)<a class=\"headerlink\"", above)
    assert unescape(re.sub("<.+?>", "", nearest)) == heading
