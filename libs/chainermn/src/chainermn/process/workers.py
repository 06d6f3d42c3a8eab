"""Set up the worker processes of a rank."""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

from chainermn.process.memory import keep_freed_memory

_PR_SET_PDEATHSIG = 1
_SAFE_PATH, _OURS = "PYTHONSAFEPATH", "set by chainermn to restore "


@contextlib.contextmanager
def without_working_folder() -> Iterator[None]:
    """Keep servers of `multiprocessing` that start meanwhile from importing the user's files.

    They run ``python -c``, which finds a ``socket.py`` in the working folder before Python's own.
    As soon as they import this module, they search where this process does.
    """
    is_ours = not os.environ.get(_SAFE_PATH)
    if is_ours:
        os.environ[_SAFE_PATH] = _OURS + json.dumps(sys.path)
    try:
        yield
    finally:
        if is_ours:
            del os.environ[_SAFE_PATH]


def is_worker() -> bool:
    """Tell whether `multiprocessing` has started this process."""
    return multiprocessing.current_process().name != "MainProcess"


def set_up_worker() -> None:
    """Keep the memory of an example for the next one, and end with the rank.

    A rank that is killed by a signal cannot end its workers, and mpiexec may wait for them
    forever.
    """
    keep_freed_memory()
    with contextlib.suppress(AttributeError, OSError):  # not Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The kernel only watches the process that forked this one. That may be the fork server, which
    # ends with the rank unless it hangs.
    threading.Thread(target=_exit_after_parent, daemon=True).start()


def _exit_after_parent() -> None:
    # While a worker starts, it does not know its parent yet.
    while (parent := multiprocessing.parent_process()) is None:
        time.sleep(0.01)
    parent.join()
    os._exit(1)


# In the fork server. Programs that workers start search as usual.
if os.environ.get(_SAFE_PATH, "").startswith(_OURS):
    sys.path[:] = json.loads(os.environ.pop(_SAFE_PATH).removeprefix(_OURS))
