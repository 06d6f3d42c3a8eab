"""Findings of axe-core on the documentation site that are accepted, with the reason."""

from __future__ import annotations

#: Rule of axe-core, pattern of pages, and why the finding is accepted.
ACCEPTED = [
    (
        "empty-table-header",
        "results/*",
        "The corner of a table whose rows have names. Measured tables are written by the "
        "benchmarks, for those who read the files too.",
    ),
    (
        "page-has-heading-one",
        "search.html",
        "The theme's, which writes a title once it has found.",
    ),
]
