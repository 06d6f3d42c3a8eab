"""What chainer-compat says."""

from __future__ import annotations

from typing import Any


def examine() -> dict[str, Any]:
    """Return its report: versions, whether its hook is in place, every repair."""
    from chainer_compat import report

    return report.collect()
