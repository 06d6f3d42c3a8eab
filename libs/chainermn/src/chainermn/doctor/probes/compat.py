"""The report of chainer-compat."""

from __future__ import annotations

from typing import Any


def examine() -> dict[str, Any]:
    """Return versions, whether the hook is in place, and every repair."""
    from chainer_compat import report

    return report.collect()
