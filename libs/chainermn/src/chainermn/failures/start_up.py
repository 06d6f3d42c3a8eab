"""Protect a rank while it initializes MPI."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
from collections.abc import Iterator

from chainermn.failures import watch
from chainermn.failures.guarded import guarded
from chainermn.failures.limits import stall_limit
from chainermn.notes import note_once
from chainermn.process.helper import HelperError
from chainermn.process.processes import numbers_in


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Guard this rank while it initializes MPI and meets the others for the first time.

    This also makes any later crash print the stack (`faulthandler`). A rank that is already
    watched does not need a guard. Raises ValueError if the stall limit is not a number of seconds.
    """
    stall_limit()
    if not faulthandler.is_enabled():
        with contextlib.suppress(Exception):  # there may be no standard error
            faulthandler.enable()
    numbers = numbers_in(os.environ)
    if watch.is_on() or numbers is None or numbers.size == 1:
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(guarded(numbers.rank))
        except HelperError as error:
            note_once(
                f"{error.strerror}: rank {numbers.rank} would wait forever for a rank that does "
                "not start"
            )
        except OSError:  # a system that cannot have guards
            pass
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            # Python cannot handle an interrupt inside MPI, so it must end the process at once.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            stack.callback(signal.signal, signal.SIGINT, signal.default_int_handler)
        yield
