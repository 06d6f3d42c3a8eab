"""Processes that read images for a rank: how they start, and that they end with it."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import threading
import time
from multiprocessing import forkserver

PR_SET_PDEATHSIG = 1
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def start_forkserver() -> None:
    """Start the process of which all workers will be copies.

    To be called before `chainermn.create_communicator`: what MPI has set up in a process must
    not be copied into another one, and so a rank must not fork once it has initialised MPI.
    """
    multiprocessing.set_start_method("forkserver", force=True)
    # Whatever takes long to import, so that a worker finds it there.
    multiprocessing.set_forkserver_preload(["__main__", "chainer", "PIL.Image"])
    forkserver.ensure_running()


def is_worker() -> bool:
    """Tell whether this process has been started by `multiprocessing`."""
    return multiprocessing.current_process().name != "MainProcess"


def keep_memory() -> None:
    """Let this process keep the memory of an image for the next one.

    Otherwise glibc gives every image's memory back to the kernel, which has to clear it page by
    page before the next image: a third of the time that reading takes.
    """
    with contextlib.suppress(AttributeError, OSError):  # another C library
        libc = ctypes.CDLL(None)
        for threshold in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
            libc.mallopt(threshold, 1 << 28)


def end_with_parent() -> None:
    """See to it that this worker does not outlive its rank, whatever way that ends.

    A rank killed by a signal cannot end its workers, and mpiexec may wait for them for ever.
    """
    _ask_kernel()
    # The kernel watches the fork server only, which ends with the rank unless it hangs.
    threading.Thread(target=_exit_after_parent, daemon=True).start()


def _ask_kernel() -> None:
    with contextlib.suppress(AttributeError, OSError):  # not Linux
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _exit_after_parent() -> None:
    # While a worker is being set up, it is not yet told who its parent is.
    while (parent := multiprocessing.parent_process()) is None:
        time.sleep(0.01)
    parent.join()
    os._exit(1)
