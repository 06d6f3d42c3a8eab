"""What users can set by environment variables."""

from __future__ import annotations

import os

#: Seconds of silence, or of waiting, after which something is wrong; 0 for never.
STALL_LIMIT = "CHAINERMN_STALL_LIMIT"
_DEFAULT = 300.0


def stall_limit() -> float:
    """Return the limit that is set.

    Raises
    ------
    ValueError
        If it is no number of seconds.
    """
    text = os.environ.get(STALL_LIMIT, "")
    try:
        limit = float(text or _DEFAULT)
    except ValueError:
        limit = -1.0
    if not 0 <= limit < float("inf"):
        raise ValueError(f"{STALL_LIMIT} must be a number of seconds, or 0 for none, got {text!r}")
    return limit
