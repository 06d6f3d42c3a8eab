"""How long ranks may be silent or wait, and how long each waits before it reports a failure."""

from __future__ import annotations

import os
from collections.abc import Mapping

#: Environment variable for the seconds of silence or waiting that count as a failure, or 0.
STALL_LIMIT = "CHAINERMN_STALL_LIMIT"
DEFAULT_LIMIT = 300.0
_SECONDS_FOR_EACH = 0.3


def stall_limit(environment: Mapping[str, str] = os.environ) -> float:
    """Return `STALL_LIMIT` in seconds; raise ValueError if it is not a number of seconds."""
    text = environment.get(STALL_LIMIT, "")
    try:
        limit = float(text or DEFAULT_LIMIT)
    except ValueError:
        limit = -1.0
    if not 0 <= limit < float("inf"):
        raise ValueError(
            f"{STALL_LIMIT} must be a number of seconds, or 0 for no limit, got {text!r}"
        )
    return limit


def report_delay(rank: int) -> float:
    """Return how many seconds a rank waits before it reports a failure that all ranks notice.

    Ranks speak in turn, until one has ended the job.
    """
    return min(rank, 10) * _SECONDS_FOR_EACH
