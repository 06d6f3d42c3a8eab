"""Connect a rank to the guard of its host."""

from __future__ import annotations

import atexit
import contextlib
import errno
import hashlib
import os
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from chainermn.failures.guard import HOLD, LEAVING, STARTING, peer_of
from chainermn.failures.limits import stall_limit
from chainermn.process.helper import HelperError, end_of, start_helper
from chainermn.process.processes import Numbers, launchers_of, numbers_in

# Pause between two attempts while another rank starts the guard, and the number of attempts.
_SECONDS_BETWEEN = 0.01
_MOST_ATTEMPTS = 1000
# How many guards a rank starts before it gives up.
_MOST_GUARDS = 3
# A process closes its sockets a moment before others see its end.
_SECONDS_TO_END = 1.0
#: Ten seconds, as the kernel takes them, in case many ranks connect to the guard at the same time.
SECONDS_TO_CONNECT = struct.pack("ll", 10, 0)


@contextlib.contextmanager
def guarded(rank: int) -> Iterator[None]:
    """Let the guard of this host watch over this rank. Raises OSError if that is impossible.

    It is a `HelperError` if the guard does not run.
    """
    with _connect() as connection:
        connection.send(STARTING + str(rank).encode())
        try:
            yield
        finally:
            # Closing it would not close a forked child's copy.
            with contextlib.suppress(OSError):  # the guard has been killed
                connection.shutdown(socket.SHUT_RDWR)


def hold_files() -> socket.socket | None:
    """Keep this rank's files open for a moment after its death, so that others can report it.

    MPICH's ``mpiexec`` ends all output of a job once a rank's files close. With MPICH 5.0.2 on two
    hosts, the message that names the rank was lost whenever it came 0.15 s late. It was never lost
    on one host or with Open MPI 5.0.11, so there this returns None.

    A rank that ends normally passes the returned connection to `release_files`.
    """
    if os.environ.get("MPI_LOCALNRANKS") == os.environ.get("PMI_SIZE"):
        return None
    with contextlib.ExitStack() as stack:
        try:
            manager = int(os.environ["PMI_FD"])  # the connection to MPICH's process manager
            os.fstat(manager)
            connection = stack.enter_context(_connect())
            socket.send_fds(connection, [HOLD], [manager])
        except (KeyError, ValueError, OSError):
            return None  # not MPICH, or the guard cannot be reached
        stack.pop_all()
        return connection


def release_files(connection: socket.socket) -> None:
    """Wait until the guard has closed this rank's files."""
    with connection, contextlib.suppress(OSError):  # the guard has been killed
        connection.send(LEAVING)
        connection.recv(1)


def _connect() -> socket.socket:
    """Connect to the guard of this host, which the first rank that needs it starts."""
    numbers = numbers_in(os.environ)
    if numbers is None:
        raise OSError(errno.ESRCH, "not started by mpiexec")
    name = _name_of_guard()
    guards: list[subprocess.Popen[bytes]] = []
    for _ in range(_MOST_ATTEMPTS):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, SECONDS_TO_CONNECT)
        try:
            connection.connect(name)
            _, user = peer_of(connection)
            if user != os.getuid():
                raise OSError(errno.EADDRINUSE, f"user {user} has taken the name of the guard")
        except ConnectionRefusedError:  # the guard does not exist yet
            connection.close()
            if len(guards) == _MOST_GUARDS:
                how = end_of(guards[-1], _SECONDS_TO_END) or "closed its socket"
                raise HelperError(
                    errno.ECHILD, f"chainermn-guard has {how}, {_MOST_GUARDS} times in a row"
                ) from None
            guards += _start_guard(name, numbers)
        except OSError:
            connection.close()
            raise
        else:
            return connection
    raise OSError(errno.ETIMEDOUT, "another rank is still starting the guard")


def _name_of_guard() -> str:
    """Return a name that the ranks of this host know and that other users cannot guess."""
    launchers = launchers_of(os.getpid())
    job = f"{launchers[0].pid}-{launchers[0].started}" if launchers else f"{os.getpid()}"
    secret = hashlib.sha256(job.encode())
    with contextlib.suppress(OSError):
        # This holds random addresses, which only the process's user may read.
        secret.update(Path(f"/proc/{job.partition('-')[0]}/auxv").read_bytes())
    return f"\0chainermn-guard-{os.getuid()}-{secret.hexdigest()}"


def _start_guard(name: str, numbers: Numbers) -> list[subprocess.Popen[bytes]]:
    """Start the guard and return it, unless another rank is about to start one."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(name)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            time.sleep(_SECONDS_BETWEEN)
            return []
        listener.listen(1024)
        arguments = {
            "listener": listener.fileno(),
            "numbers": numbers,
            "limit": stall_limit(),
        }
        guard = start_helper("chainermn.failures.guard", arguments, [listener.fileno()])
    atexit.register(guard.poll)  # by then, it has usually ended
    return [guard]
