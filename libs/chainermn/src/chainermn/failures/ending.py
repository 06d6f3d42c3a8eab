"""End the whole job, whatever state this rank, MPI and the network are in."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from chainermn.failures.processes import Process, family_of, find, launchers_of

# mpiexec forwards what ranks print, but an abort reaches it another way and would overtake it.
SECONDS_FOR_OUTPUT = 0.3
# On a busy host it takes longer until mpiexec begins.
_SECONDS_UNTIL_READ = 1.2
# How long MPI has for ending all processes of the job before they are killed.
_SECONDS_FOR_MPI = 5
# How long a rank that has nothing to say waits for the one that says it to end the job.
SECONDS_FOR_THE_FIRST = 2.0

# The arguments are seconds, then processes as PID:START. It runs without Python, whose files may
# lie beyond a network that is down.
_REAPER = """
is_there() {
    read -r stat 2>/dev/null <"/proc/${1%:*}/stat" || return 1
    set -- "${1#*:}" ${stat##*) }
    [ "$2" != Z ] && [ "${21}" = "$1" ]
}
tenths=$1; shift
while [ "$tenths" -gt 0 ]; do
    left=
    for process; do is_there "$process" && left=yes; done
    [ "$left" ] || exit
    sleep 0.1
    tenths=$((tenths - 1))
done
for process; do is_there "$process" && kill -KILL "${process%:*}"; done
"""

_ending = threading.Lock()
_reapers: list[subprocess.Popen[bytes]] = []


def end_job(
    message: str,
    patience: float = SECONDS_FOR_OUTPUT,
    *,
    after: float = 0.0,
    announce: Callable[[], bool] = lambda: True,
) -> NoReturn:
    """Print a message and end all processes of the job, on this host even if MPI is stuck.

    May be called in any thread, and in several: each prints, the first one ends the process.

    Parameters
    ----------
    message : str
        Printed to standard error in one piece; nothing if it is empty.
    patience : float
        Seconds between that and the end.
    after : float
        Seconds to wait before all of it, so that another rank can be first.
    announce : callable
        Called at the very beginning: what other threads do because of it comes second. Returns
        whether this process is to print the message: otherwise another one does, and ends the job.
    """
    is_first = _ending.acquire(blocking=False)
    with contextlib.suppress(Exception):  # whatever is wrong, even if no memory is left
        if not announce():
            message, after = "", SECONDS_FOR_THE_FIRST
        if is_first:
            start_reaper(os.getpid())
    time.sleep(after)
    if message:
        print_at_once(message)
        _wait_until_read()
        time.sleep(patience)
    while not is_first:
        time.sleep(60)
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.COMM_WORLD.Abort(1)
    # From a signal mpiexec knows that something has failed, not always from an exit code.
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


def print_at_once(message: str) -> None:
    """Write to standard error in one piece, lest the output of other ranks come in between."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    left = f"{message.rstrip()}\n".encode(errors="replace")
    with contextlib.suppress(OSError):
        while left:
            left = left[os.write(2, left) :]


def _wait_until_read() -> None:
    """Wait, for a while, until whoever reads standard error has taken what is in the pipe."""
    deadline = time.monotonic() + _SECONDS_UNTIL_READ
    with contextlib.suppress(OSError):  # not a pipe
        while time.monotonic() < deadline:
            (unread,) = struct.unpack("i", fcntl.ioctl(2, termios.FIONREAD, b"\0" * 4))
            if not unread:
                return
            time.sleep(0.01)


def start_reaper(pid: int) -> None:
    """Have a rank's process killed after a while, with all that mpiexec has started on this host.

    The processes of the job go first; MPI's daemon and ``mpiexec`` go last.
    """
    me = find(pid)
    if me is None:
        return
    launchers = launchers_of(me.pid)
    family = family_of((launchers or [me])[-1].pid)
    victims: list[Process] = [*(p for p in family if not p.is_launcher), *launchers, *family]
    names = dict.fromkeys(f"{victim.pid}:{victim.started}" for victim in victims)
    with contextlib.suppress(OSError):
        # It keeps none of the pipes open from whose end mpiexec knows that a rank has ended.
        _reapers.append(
            subprocess.Popen(
                ["/bin/sh", "-c", _REAPER, "sh", str(10 * _SECONDS_FOR_MPI), *names],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
                env={"PATH": "/usr/bin:/bin"},
            )
        )
