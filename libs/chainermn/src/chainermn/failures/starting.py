"""Watch a job start, while ranks wait for each other inside MPI."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
from collections.abc import Iterator

from chainermn.failures import watch
from chainermn.failures.helper import start_helper
from chainermn.failures.processes import RANK_VARIABLES
from chainermn.failures.settings import stall_limit


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Watch this rank, by a `guard`, while it initialises MPI and first meets the others.

    From then on, a crash prints the stack (`faulthandler`). A rank that is already watched needs
    no guard.

    Raises
    ------
    ValueError
        If the stall limit is not a number of seconds.
    """
    limit = stall_limit()
    if not faulthandler.is_enabled():
        with contextlib.suppress(Exception):  # no standard error to write to
            faulthandler.enable()
    if watch.is_on() or not any(os.environ.get(name, "1") != "1" for _, name, _ in RANK_VARIABLES):
        yield
        return
    guard = None
    with contextlib.suppress(OSError):
        guard = start_helper("guard", {"pid": os.getpid(), "limit": limit})
    try:
        with _interrupts_end_the_process():
            yield
    finally:
        if guard is not None:
            guard.kill()
            guard.wait()


@contextlib.contextmanager
def _interrupts_end_the_process() -> Iterator[None]:
    """Let an interrupt end the process at once: Python cannot handle it inside MPI."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
