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
    """The turn of a background thread, after all NCCL work that has been begun before.

    Make it where the script begins the work. The thread calls `begin`, and `end` when the GPU has
    done the work. What else uses NCCL after the making of it waits for the end.
    """

    def __init__(self) -> None:
        global _latest
        self._is_over = threading.Event()
        self._before, _latest = _latest, self

    def begin(self) -> None:
        """Wait until all earlier turns are over."""
        if self._before is not None:
            self._before.wait()
            self._before = None
        _of_thread.has_turn = True

    def end(self) -> None:
        """Let others use NCCL."""
        _of_thread.has_turn = False
        self._is_over.set()

    def wait(self) -> None:
        """Wait for the end."""
        self._is_over.wait()


def wait_for_turn() -> None:
    """Wait until this thread may use NCCL: at once in its turn, otherwise after all turns."""
    if _latest is not None and not getattr(_of_thread, "has_turn", False):
        _latest.wait()
