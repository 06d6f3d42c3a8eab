"""Memory that the ranks of a host share."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

_DIRECTORY = "/dev/shm"


def share_memory(mpi_comm: MPI.Intracomm, n_bytes: int) -> mmap.mmap | str:
    """Return memory that all ranks share, or the reason why this rank has none. Collective.

    It is zero at first.

    The kernel frees the memory as soon as the last rank unmaps it, even if ranks are killed.
    """
    path: Path | str = ""
    if mpi_comm.rank == 0:
        path = _made_or_reason(lambda: _create_file(n_bytes))
    path = cast("Path | str", mpi_comm.bcast(path))
    memory = path if isinstance(path, str) else _made_or_reason(lambda: _map_file(path, n_bytes))
    mpi_comm.Barrier()
    if mpi_comm.rank == 0 and isinstance(path, Path):
        path.unlink()
    return memory


def _made_or_reason(make: Callable[[], T]) -> T | str:
    try:
        return make()
    except Exception as error:  # of any kind: the other ranks wait for the outcome
        return str(error) or repr(error)


def _create_file(n_bytes: int) -> Path:
    descriptor, path = tempfile.mkstemp(prefix="chainermn-", dir=_DIRECTORY)
    try:
        # Otherwise writing to the memory on a full file system would kill the process.
        os.posix_fallocate(descriptor, 0, n_bytes)
    except Exception:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)
    return Path(path)


def _map_file(path: Path, n_bytes: int) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), n_bytes)
