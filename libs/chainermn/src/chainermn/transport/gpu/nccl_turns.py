"""Turns of threads in using NCCL: on all ranks in the same order.

A thread that exchanges in the background has an NCCL communicator to itself. Kernels of two
communicators can deadlock: each occupies a part of the GPU until it has met those of the other
ranks, and on another GPU the other one may have come first. So one begins when the other is over,
in the order in which the ranks' scripts begin them.
"""

from __future__ import annotations

import threading

_of_thread = threading.local()
_latest: Turn | None = None


class Turn:
    """The turn of a background thread, after all NCCL work that has been begun before it.

    Make it where the script begins the work. The thread does the work inside the ``with`` block,
    and does not leave that before the GPU is done with it. Everything that uses NCCL later waits.
    """

    def __init__(self) -> None:
        global _latest
        self._over = threading.Event()
        self._before, _latest = _latest, self

    def wait(self) -> None:
        """Wait until it is over."""
        self._over.wait()

    def __enter__(self) -> None:
        if self._before is not None:
            self._before.wait()
            self._before = None
        _of_thread.has_turn = True

    def __exit__(self, *_: object) -> None:
        _of_thread.has_turn = False
        self._over.set()


def wait_for_turn() -> None:
    """Wait until this thread may use NCCL: at once in its turn, otherwise after all turns."""
    if _latest is not None and not getattr(_of_thread, "has_turn", False):
        _latest.wait()
