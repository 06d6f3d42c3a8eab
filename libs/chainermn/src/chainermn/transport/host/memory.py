"""Share memory among the ranks of a host, and with nobody else: it never has a name."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import socket
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

#: Folder for files without a name.
DIRECTORY = "/dev/shm"  # noqa: S108


def share_memory(mpi_comm: MPI.Intracomm, n_bytes: int) -> mmap.mmap | str:
    """Return memory that all ranks share, or the reason why this rank has none. Collective.

    The memory is initially zero. Rank 0 decides its size, which `len` returns.

    Rank 0 passes its descriptor on through a local socket, so there is no file for others to open
    or for a job to leave behind. The kernel frees the memory as soon as the last rank is gone,
    even if ranks are killed.
    """
    return _offer(mpi_comm, n_bytes) if mpi_comm.rank == 0 else _take(mpi_comm)


class _Endpoint(NamedTuple):
    """The address at which ranks ask for the memory, and the token that they must show.

    Any user of the host can list the address and connect to it, but only MPI carries the token.
    """

    address: bytes
    token: bytes


class _Offer(NamedTuple):
    descriptor: int
    memory: mmap.mmap
    door: socket.socket
    endpoint: _Endpoint


def _offer(mpi_comm: MPI.Intracomm, n_bytes: int) -> mmap.mmap | str:
    with contextlib.ExitStack() as stack:
        offer = _made_or_reason(lambda: _prepare(n_bytes, stack))
        mpi_comm.bcast(offer if isinstance(offer, str) else offer.endpoint)
        if isinstance(offer, str):
            return offer
        mpi_comm.Barrier()  # all have asked
        memory = _made_or_reason(lambda: _hand_out(offer, mpi_comm.size - 1))
        mpi_comm.Barrier()
        return memory


def _take(mpi_comm: MPI.Intracomm) -> mmap.mmap | str:
    endpoint = cast("_Endpoint | str", mpi_comm.bcast(None))
    if isinstance(endpoint, str):
        return endpoint
    with contextlib.ExitStack() as stack:
        asking = _made_or_reason(lambda: _ask(endpoint, stack))
        mpi_comm.Barrier()
        mpi_comm.Barrier()  # rank 0 has sent the descriptors
        return asking if isinstance(asking, str) else _made_or_reason(lambda: _receive(asking))


def _made_or_reason(make: Callable[[], T]) -> T | str:
    try:
        return make()
    except Exception as error:  # of any kind, because the other ranks wait for the outcome
        return str(error) or repr(error)


def _prepare(n_bytes: int, stack: contextlib.ExitStack) -> _Offer:
    descriptor = _open_memory()
    stack.callback(os.close, descriptor)
    os.fchmod(descriptor, 0o600)
    # Without this, writing to the memory would kill the process if there is too little.
    os.posix_fallocate(descriptor, 0, n_bytes)
    door = stack.enter_context(socket.socket(socket.AF_UNIX))
    door.setblocking(False)  # never wait for anyone
    # This name is in the abstract namespace, which has no files.
    endpoint = _Endpoint(f"\0chainermn-{secrets.token_hex(16)}".encode(), secrets.token_bytes(32))
    door.bind(endpoint.address)
    door.listen(socket.SOMAXCONN)
    return _Offer(descriptor, mmap.mmap(descriptor, 0), door, endpoint)


def _open_memory() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("chainermn")
    # Pythons built for a glibc older than 2.27 do not have memfd_create.
    with tempfile.TemporaryFile(dir=DIRECTORY) as file:
        return os.dup(file.fileno())


def _hand_out(offer: _Offer, n_ranks: int) -> mmap.mmap:
    _, _, door, (_, token) = offer
    with contextlib.suppress(BlockingIOError):  # a rank that did not ask reports why
        # Only those that are waiting by now, since others may keep coming.
        for _ in range(socket.SOMAXCONN + 1):
            if not n_ranks:
                break
            asking, _ = door.accept()
            with asking:
                asking.setblocking(False)
                if _is_shown(token, asking):
                    socket.send_fds(asking, [b"\0"], [offer.descriptor])
                    n_ranks -= 1
    return offer.memory


def _is_shown(token: bytes, asking: socket.socket) -> bool:
    try:
        return secrets.compare_digest(asking.recv(len(token)), token)
    except OSError:
        return False


def _ask(endpoint: _Endpoint, stack: contextlib.ExitStack) -> socket.socket:
    asking = stack.enter_context(socket.socket(socket.AF_UNIX))
    asking.setblocking(False)
    asking.connect(endpoint.address)
    asking.sendall(endpoint.token)
    return asking


def _receive(asking: socket.socket) -> mmap.mmap:
    _, descriptors, _, _ = socket.recv_fds(asking, 1, 1)
    if not descriptors:
        raise OSError("rank 0 sent no memory")
    with open(descriptors[0], "r+b", buffering=0) as file:
        return mmap.mmap(file.fileno(), 0)
