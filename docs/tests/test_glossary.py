"""Each word of the glossary is explained briefly, with a link to the page where it matters."""

from __future__ import annotations

import re

import pages
import pytest

_, *ENTRIES = re.split(r"^## ", pages.read(pages.DOCS / "glossary.md"), flags=re.MULTILINE)
WORDS = [entry.partition("\n")[0] for entry in ENTRIES]


def test_words_of_the_library_are_there_in_alphabetical_order() -> None:
    assert sorted(WORDS, key=str.lower) == WORDS
    assert set(WORDS) >= {"rank", "root", "host", "all-reduce", "bucket", "shard", "replica"}


@pytest.mark.parametrize("entry", ENTRIES, ids=WORDS)
def test_entry_is_short_and_has_a_link(entry: str) -> None:
    text = " ".join(line for line in entry.splitlines()[1:] if not line.startswith("<!--"))
    assert re.search(r"\]\([\w/]+\.md", text)
    assert text.count(". ") <= 2  # three sentences
