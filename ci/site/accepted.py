"""Findings of axe-core on the documentation site that are accepted, with the reason."""

from __future__ import annotations

#: Rule of axe-core, pattern of pages, and why the finding is accepted.
ACCEPTED = [
    (
        "page-has-heading-one",
        "search.html",
        "The theme's, which writes a title once it has found.",
    ),
]
