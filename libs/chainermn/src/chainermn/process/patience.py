"""Wait for a limited time, of which only that counts in which this machine runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

_LONGEST_WAIT = 1.0


def wait_patiently(wait: Callable[[float], Result], seconds: float) -> Result:
    """Call ``wait`` with at most a second until it returns something true, or time is up.

    Virtual machines and laptops are suspended for minutes. Afterwards it looks as if a call had
    taken that long, so each one counts only as what it was asked to wait.

    Parameters
    ----------
    wait : callable
        Waits for at most the given number of seconds; returns something false if nothing came.
    seconds : float
        How long to wait in all; at least one call is made.

    Returns
    -------
    object
        The last result of ``wait``.
    """
    while not (found := wait(min(seconds, _LONGEST_WAIT))) and seconds > _LONGEST_WAIT:
        seconds -= _LONGEST_WAIT
    return found
