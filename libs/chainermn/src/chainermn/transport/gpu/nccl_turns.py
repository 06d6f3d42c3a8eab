"""Let threads take turns in using NCCL, in the same order on all ranks.

A thread that exchanges in the background has its own NCCL communicator. Kernels of two
communicators can deadlock: each kernel occupies part of the GPU until it has met those of the
other ranks, but on another GPU the other communicator may have been first. So one starts only when
the other is done, in the order in which the scripts start them.
"""

from __future__ import annotations

import threading

_of_thread = threading.local()
_latest: Turn | None = None


class Turn:
    """The turn of a background thread, after all NCCL work that was started earlier.

    Create it where the script starts the work. The thread calls `begin`, and `end` when the GPU
    has done the work. All later uses of NCCL wait for the end of the turn.
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
        """Wait for the end of this turn."""
        self._is_over.wait()


def wait_for_turn() -> None:
    """Wait until this thread may use NCCL: immediately in its turn, otherwise after all turns."""
    if _latest is not None and not getattr(_of_thread, "has_turn", False):
        _latest.wait()
