"""End the whole job, in whatever state this rank, MPI and the network are."""

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

from chainermn.failures.launcher import RANK, tell_end
from chainermn.process.helper import start_shell
from chainermn.process.processes import Process, family_of, launchers_of, shared_memory_of
from chainermn.process.streams import has_standard_error

# mpiexec forwards output and aborts on different paths, so an abort would overtake the output.
SECONDS_FOR_OUTPUT = 0.3
# A busy mpiexec may take longer to read the output.
_SECONDS_UNTIL_READ = 1.2
# Seconds that a rank with nothing to print gives the printing rank to end the job: more than that
# rank waits above, less than MPI gets below.
SECONDS_FOR_THE_FIRST = 4.0

# The arguments are tenths of a second, files to remove, and processes as PID:START.
_REAPER = """
is_there() {
    read -r stat 2>/dev/null <"/proc/${1%:*}/stat" || return 1
    set -- "${1#*:}" ${stat##*) }
    [ "$2" != Z ] && [ "${21}" = "$1" ]
}
tenths=$1 files=$2; shift 2
while [ "$tenths" -gt 0 ]; do
    left=
    for process; do is_there "$process" && left=yes; done
    [ "$left" ] || break
    sleep 0.1
    tenths=$((tenths - 1))
done
for process; do is_there "$process" && kill -KILL "${process%:*}"; done
rm -f $files
"""

# A rank can be killed while it draws a live view. This ends a cut escape sequence, color or line,
# and erases the rest of the view before.
_AFTER_A_VIEW = "\030\033[m\n\033[J"

_before = ""  # at the beginning of each message
_ending = threading.Lock()


def end_job(
    message: str,
    *,
    after: float = 0.0,
    announce: Callable[[], bool] = lambda: True,
    lost: str = "",
) -> NoReturn:
    """Print a message and end all processes of the job, even if MPI is stuck on this host.

    Several threads may call this: each prints, and the first one ends the process. It first calls
    ``announce``, which returns False if another process prints the message and ends the job. The
    message, if there is one, comes ``after`` that many seconds, so that another rank can be first.
    The launcher learns which host is ``lost``, if any.
    """
    is_first = _ending.acquire(blocking=False)
    with contextlib.suppress(Exception):  # keep going, even without any memory left
        if not announce():
            message, after = "", SECONDS_FOR_THE_FIRST
        if is_first:
            _reaper = start_reaper(os.getpid())  # kept, so that Python does not warn of it
    time.sleep(after)
    if message:
        print_at_once(message)
        with contextlib.suppress(Exception):
            tell_end(RANK, lost)
        _wait_until_read()
        time.sleep(SECONDS_FOR_OUTPUT)
    while not is_first:
        time.sleep(60)
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi and mpi.Is_initialized() and not mpi.Is_finalized():
        if not has_standard_error():  # MPI would print into the file that has its number
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        mpi.COMM_WORLD.Abort(1)
    # mpiexec always takes a signal as a failure, but not always an exit code.
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


def use_terminal(is_terminal: bool) -> None:
    """Tell whether a terminal shows messages, perhaps after a live view that was cut off."""
    global _before
    _before = _AFTER_A_VIEW if is_terminal else ""


def print_at_once(message: str, file: int = 2) -> None:
    """Write to standard error in one piece, so that output of other ranks does not mix in.

    A script without standard error may have given it another ``sys.stderr``.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    text = f"{_before}{message.rstrip()}\n"
    if file == 2 and not has_standard_error():
        with contextlib.suppress(Exception):
            print(text, end="", file=sys.stderr, flush=True)
        return
    left = text.encode(errors="replace")
    with contextlib.suppress(OSError):
        while left:
            left = left[os.write(file, left) :]


def _wait_until_read() -> None:
    """Wait, for a limited time, until the pipe behind standard error has been read."""
    if not has_standard_error():
        return
    deadline = time.monotonic() + _SECONDS_UNTIL_READ
    with contextlib.suppress(OSError):  # not a pipe
        while time.monotonic() < deadline:
            (unread,) = struct.unpack("i", fcntl.ioctl(2, termios.FIONREAD, b"\0" * 4))
            if not unread:
                return
            time.sleep(0.01)


def start_reaper(pid: int, *, after: int = 5) -> subprocess.Popen[bytes] | None:
    """Start a process that kills a rank, with all that mpiexec has started on this host.

    MPI first gets ``after`` seconds to end them. Returns None if there is nothing to kill, or if
    no process can be started.

    It kills the processes of the job first, MPI's daemon and ``mpiexec`` last. Open MPI 5.0.11
    needs this, because its ``mpiexec`` waits for a host that the network no longer reaches. MPICH
    5.0.2 does not, but leaves 1 MiB of shared memory for each rank, until a container has no more.
    """
    launchers = launchers_of(pid)
    family = family_of(launchers[-1].pid if launchers else pid)
    if not family:
        return None
    victims: list[Process] = [*(p for p in family if not p.is_launcher), *launchers, *family]
    names = dict.fromkeys(f"{victim.pid}:{victim.started}" for victim in victims)
    with contextlib.suppress(OSError):
        # An open pipe would hide from mpiexec that a rank has ended.
        return start_shell(
            _REAPER,
            str(10 * after),
            " ".join(shared_memory_of(pid)),
            *names,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    return None
