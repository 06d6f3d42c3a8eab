"""What axe-core finds on the documentation site and what stays, with the reason."""

from __future__ import annotations

#: Rule of axe-core, pages as a pattern, and why nothing is done about it.
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
