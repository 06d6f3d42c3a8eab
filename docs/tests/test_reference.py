"""The API reference shows what users need, by the names under which they import it.

The site's build checks more: it fails on signatures with the word "abstract" or private names.
"""

from __future__ import annotations

import inspect
import re

import pages
from reference import API, directives, named

import chainermn

#: Matches the line of the library's README that names what the library itself builds on.
INTERNALS = r"^\| \*`([\w ]+)`\* \|.*\| What batch normalization here builds on"

FOR_AUTHORS_OF_COMMUNICATORS = (
    API / "communicators.md",
    pages.DOCS / "guides/new_communicator.md",
)


def internals_of_communicators() -> set[str]:
    readme = pages.read(pages.ROOT / "libs/chainermn/README.md")
    (names,) = re.findall(INTERNALS, readme, re.MULTILINE)
    return set(names.split())


def test_internals_of_communicators_are_left_out() -> None:
    reference = pages.read(API / "communicators.md")
    (left_out,) = re.findall(r":exclude-members: ((?:.*,\n)*.*)\n", reference)
    assert set(re.findall(r"\w+", left_out)) == internals_of_communicators()
    assert internals_of_communicators() <= set(dir(chainermn.CommunicatorBase))


def test_pages_for_users_speak_of_no_internals() -> None:
    word = re.compile(rf"\b({'|'.join(internals_of_communicators())})\b")
    places = {
        f"{page.relative_to(pages.DOCS)}: {name}"
        for page in pages.PAGES
        if page.parent.name != "design" and page not in FOR_AUTHORS_OF_COMMUNICATORS
        for name in word.findall(pages.read(page))
    }
    assert places == set()


def test_what_has_a_public_name_is_shown_under_it() -> None:
    shown = {directive["path"] for directive in directives()}
    assert len(shown) > 50
    public = {}
    for module in filter(
        inspect.ismodule, (getattr(chainermn, name) for name in chainermn.__all__)
    ):
        names = getattr(module, "__all__", ())
        public.update({name: f"{module.__name__}.{name}" for name in names})
    public.update({name: f"chainermn.{name}" for name in chainermn.__all__})
    longer = {}
    for path in sorted(shown):
        short = public.get(path.rpartition(".")[2], path)
        if short != path and named(short) is named(path):
            longer[path] = short
    assert longer == {}
