"""Settings that users make by environment variables."""

from __future__ import annotations

import os

#: Seconds of silence or waiting that count as a failure; 0 for no limit.
STALL_LIMIT = "CHAINERMN_STALL_LIMIT"
_DEFAULT = 300.0


def stall_limit() -> float:
    """Return `STALL_LIMIT` in seconds; raise ValueError if it is not a number of seconds."""
    text = os.environ.get(STALL_LIMIT, "")
    try:
        limit = float(text or _DEFAULT)
    except ValueError:
        limit = -1.0
    if not 0 <= limit < float("inf"):
        raise ValueError(f"{STALL_LIMIT} must be a number of seconds, or 0 for none, got {text!r}")
    return limit
