"""Memory that the ranks of a host share, and what reducers through it have in common."""

from __future__ import annotations

import mmap
import os
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from typing_extensions import override

from chainermn.transport.reducer import Array, Dtype, Pending, Reducer, Steps, shard_bounds

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

# A file there has a random name, is for this user alone, and is unlinked once all have it open.
_DIRECTORY = "/dev/shm"  # noqa: S108

#: What a rank writes for others to wait for has a cache line for itself, and the adjacent one,
#: which processors prefetch along with it.
LINE_BYTES = 128


class SharingReducer(Reducer):
    """A reducer over ranks of one host, by the sum and the distribution that a subclass has.

    Nothing leaves the host, so nothing is rounded to a wire dtype.
    """

    @override
    def allreduce(self, array: Array, divisor: int = 1, wire_dtype: Dtype | None = None) -> Steps:
        return self._sum(array, divisor, 0, array.size)

    @override
    def reduce(self, array: Array, divisor: int = 1) -> Steps:
        return self._sum(array, divisor, 0, array.size if self.rank == 0 else 0)

    @override
    def reduce_scatter(self, array: Array, divisor: int = 1) -> Generator[Pending, None, Array]:
        begin, end = shard_bounds(array.size, self.size)[self.rank]
        yield from self._sum(array, divisor, begin, end)
        return array[begin:end]

    @override
    def allgather(self, array: Array) -> Steps:
        return self._distribute(array, *shard_bounds(array.size, self.size)[self.rank])

    @override
    def bcast(self, array: Array) -> Steps:
        return self._distribute(array, 0, array.size if self.rank == 0 else 0)

    @abstractmethod
    def _sum(self, array: Array, divisor: int, begin: int, end: int) -> Steps:
        """Replace ``array[begin:end]`` by the sum, divided by ``divisor``."""

    @abstractmethod
    def _distribute(self, array: Array, begin: int, end: int) -> Steps:
        """Give the others ``array[begin:end]``, and fill the rest with theirs."""


def share_memory(mpi_comm: MPI.Intracomm, n_bytes: int) -> mmap.mmap | str:
    """Return memory that all ranks share, or the reason why this rank has none. Collective.

    It is zero at first. Rank 0 decides about its size: `len` tells.

    The kernel frees the memory as soon as the last rank unmaps it, even if ranks are killed.
    """
    path: Path | str = ""
    if mpi_comm.rank == 0:
        path = _made_or_reason(lambda: _create_file(n_bytes))
    path = cast("Path | str", mpi_comm.bcast(path))
    memory = path if isinstance(path, str) else _made_or_reason(lambda: _map_file(path))
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


def _map_file(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)
