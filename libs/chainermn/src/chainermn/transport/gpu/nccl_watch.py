"""Detect errors of NCCL while no thread calls it.

A rank may wait for its GPU, which waits for other ranks. Such a rank makes no call that could
raise the error. (`chainermn.failures` detects processes that end.)
"""

from __future__ import annotations

import functools
import sys
import threading
import time
import traceback
import weakref
from typing import TYPE_CHECKING

from chainermn.failures import end_job
from chainermn.transport.host.mpi import host_name

if TYPE_CHECKING:
    from chainermn.transport.gpu.nccl import NcclTransport

_SECONDS_BETWEEN_LOOKS = 1.0
# Time that the rank gets to raise the error itself, in its next call.
_SECONDS_FOR_RAISING = 4.0

_lock = threading.Lock()
_watched: weakref.WeakSet[NcclTransport] = weakref.WeakSet()


def watch(transport: NcclTransport) -> None:
    """End the job if ``transport`` fails and still exists some seconds later."""
    with _lock:
        _watched.add(transport)
        _start()


@functools.cache
def _start() -> None:
    threading.Thread(target=_run, name="chainermn-nccl-watch", daemon=True).start()


def _run() -> None:
    failing_since: float | None = None
    while True:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
        failure = _first_failure()
        if failure is None:
            failing_since = None
            continue
        now = time.monotonic()
        failing_since = failing_since or now
        if now - failing_since > _SECONDS_FOR_RAISING:
            end_job(f"chainermn: {failure}\nEnding the whole job.")


def _first_failure() -> str | None:
    with _lock:
        watched = list(_watched)
    return next((failure for each in watched if (failure := _failure_of(each))), None)


def _failure_of(transport: NcclTransport) -> str | None:
    try:
        return transport.failure()
    except Exception:
        # A job that hangs is better than ending a job that works. Other transports stay watched.
        with _lock:
            _watched.discard(transport)
        print(
            f"chainermn: on rank {transport.rank} of {transport.size}, on {host_name()}, a "
            "failure of NCCL may make the job hang from now on, because asking NCCL for errors "
            f"has failed:\n{traceback.format_exc()}",
            file=sys.stderr,
        )
        return None
