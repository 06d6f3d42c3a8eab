"""Collectives on flat arrays in host memory, over MPI."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from mpi4py import MPI

Array: TypeAlias = NDArray[Any]
Op = Literal["sum", "mean", "max", "min", "prod"]

# Messages inside a collective must not be taken for the user's on the same communicator, whose
# tags start at 0: this is the highest tag that every MPI has.
_COLLECTIVE_TAG = 32767

# MPI counts elements in a C int.
_MAX_COUNT = 2**30

# What launchers tell the processes they start about the size of the job.
_LAUNCHER_SIZES = {"PMI_SIZE": "MPICH", "OMPI_COMM_WORLD_SIZE": "Open MPI"}


def load_mpi() -> ModuleType:
    """Import ``mpi4py.MPI``, which initialises MPI.

    Returns
    -------
    module
        ``mpi4py.MPI``.

    Raises
    ------
    RuntimeError
        If no MPI library can be loaded, or if ``mpiexec`` is another MPI's than the library:
        each process would then be a job of its own.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise RuntimeError(
            f"mpi4py cannot load an MPI library: {error}\n"
            "Install one beside it, for example with: pip install 'chainermn[mpich]'"
        ) from error
    for variable, launcher in _LAUNCHER_SIZES.items():
        launched = os.environ.get(variable, "1")
        if MPI.COMM_WORLD.size == 1 and launched.isdigit() and int(launched) > 1:
            raise RuntimeError(
                f"mpiexec of {launcher} started {launched} processes, but each of them is alone: "
                f"mpi4py uses another MPI ({MPI.Get_library_version().splitlines()[0].strip()}). "
                "Start the job with the mpiexec of that MPI; "
                "for an MPI installed by pip it lies beside the Python executable"
            )
    return MPI


def world() -> MPI.Intracomm:
    """Return MPI's communicator of all processes, initialising MPI if need be."""
    return cast("MPI.Intracomm", load_mpi().COMM_WORLD)


def host_name() -> str:
    """Return the name by which MPI knows this host."""
    return cast(str, load_mpi().Get_processor_name())


def shard_bounds(n: int, size: int) -> list[tuple[int, int]]:
    """Divide ``range(n)`` into ``size`` consecutive parts whose lengths differ by one at most."""
    return [(n * i // size, n * (i + 1) // size) for i in range(size)]


def _chunks(array: Array) -> Iterator[Array]:
    for start in range(0, array.size, _MAX_COUNT):
        yield array[start : start + _MAX_COUNT]


class MpiTransport:
    """Collectives over the ranks of an MPI communicator, on arrays in host memory.

    Every array is one-dimensional and C-contiguous, of the same length and dtype on all ranks;
    ``array`` is changed in place. Sums of float16 are made in float32: each rank adds up its
    shard of the elements and hands it to the others, so that the bytes on the wire stay half
    and the rounding does not grow with the number of ranks.

    Parameters
    ----------
    mpi_comm : mpi4py.MPI.Intracomm
        Its ranks take part.
    """

    def __init__(self, mpi_comm: MPI.Intracomm) -> None:
        mpi = load_mpi()
        self.mpi_comm = mpi_comm
        self.rank: int = mpi_comm.rank
        self.size: int = mpi_comm.size
        self._in_place = mpi.IN_PLACE
        self._byte = mpi.BYTE
        self._ops = {
            "sum": mpi.SUM,
            "mean": mpi.SUM,
            "max": mpi.MAX,
            "min": mpi.MIN,
            "prod": mpi.PROD,
        }

    def allreduce(self, array: Array, op: Op = "sum", divisor: int = 1) -> None:
        """Combine the arrays of all ranks; every rank gets the result.

        Parameters
        ----------
        array : ndarray of shape (n,), integers, bool or floats
        op : {'sum', 'mean', 'max', 'min', 'prod'}
        divisor : int
            The sum is divided by it, before it is rounded to the dtype of ``array``.
        """
        if op == "mean":
            divisor *= self.size
        if array.dtype == np.float16:
            self._allreduce_float16(array, op, divisor)
            return
        for chunk in _chunks(array):
            self.mpi_comm.Allreduce(self._in_place, chunk, self._ops[op])
        _divide(array, divisor)

    def reduce(self, array: Array, root: int = 0, divisor: int = 1) -> None:
        """Add up the arrays of all ranks on ``root``; elsewhere ``array`` becomes undefined."""
        if array.dtype == np.float16:
            self._reduce_float16(array, root, divisor)
            return
        for chunk in _chunks(array):
            if self.rank == root:
                self.mpi_comm.Reduce(self._in_place, chunk, self._ops["sum"], root)
            else:
                self.mpi_comm.Reduce(chunk, None, self._ops["sum"], root)
        if self.rank == root:
            _divide(array, divisor)

    def bcast(self, array: Array, root: int = 0) -> None:
        """Give every rank the array of ``root``."""
        for chunk in _chunks(array.view(np.uint8)):
            self.mpi_comm.Bcast([chunk, self._byte], root)

    def reduce_scatter(self, array: Array, divisor: int = 1) -> Array:
        """Add up the arrays of all ranks; each rank gets its shard of the sum.

        Returns
        -------
        ndarray
            The shard ``shard_bounds(array.size, size)[rank]``: a view of ``array``. The rest of
            ``array`` becomes undefined.
        """
        begin, end = shard_bounds(array.size, self.size)[self.rank]
        shard = array[begin:end]
        received = self._exchange_shards(array)
        wide = np.float32 if array.dtype == np.float16 else array.dtype
        total = received[0].astype(wide)
        for part in received[1:]:
            total += part
        _divide(total, divisor)
        shard[...] = total
        return shard

    def allgather(self, array: Array) -> None:
        """Give every rank the shards of all: the reverse of :meth:`reduce_scatter`."""
        bounds = shard_bounds(array.size, self.size)
        raw, item = array.view(np.uint8), array.itemsize
        if array.nbytes < _MAX_COUNT:
            counts = [(end - begin) * item for begin, end in bounds]
            offsets = [begin * item for begin, _ in bounds]
            self.mpi_comm.Allgatherv(self._in_place, [raw, counts, offsets, self._byte])
            return
        for owner, (begin, end) in enumerate(bounds):
            self.bcast(array[begin:end], owner)

    def send(self, array: Array, dest: int, tag: int = _COLLECTIVE_TAG) -> None:
        """Send ``array`` to ``dest``, which calls :meth:`recv`."""
        for chunk in _chunks(array.view(np.uint8)):
            self.mpi_comm.Send([chunk, self._byte], dest, tag)

    def recv(self, array: Array, source: int, tag: int = _COLLECTIVE_TAG) -> None:
        """Fill ``array`` with what ``source`` sends."""
        for chunk in _chunks(array.view(np.uint8)):
            self.mpi_comm.Recv([chunk, self._byte], source, tag)

    def exchange(self, array: Array, dest: int, into: Array, source: int) -> None:
        """Send ``array`` to ``dest`` while receiving ``into`` from ``source``."""
        outgoing = [
            self.mpi_comm.Isend([chunk, self._byte], dest, _COLLECTIVE_TAG)
            for chunk in _chunks(array.view(np.uint8))
        ]
        self.recv(into, source)
        for request in outgoing:
            request.Wait()

    def _exchange_shards(self, array: Array) -> list[Array]:
        """Return this rank's shard of every rank's array, in the order of the ranks."""
        bounds = shard_bounds(array.size, self.size)
        begin, end = bounds[self.rank]
        parts = [array[begin:end]] * self.size
        for step in range(1, self.size):
            dest, source = (self.rank + step) % self.size, (self.rank - step) % self.size
            parts[source] = np.empty(end - begin, array.dtype)
            to_send, to_end = bounds[dest]
            self.exchange(array[to_send:to_end], dest, parts[source], source)
        return parts

    def _allreduce_float16(self, array: Array, op: Op, divisor: int) -> None:
        if op in ("sum", "mean"):
            self.reduce_scatter(array, divisor)
            self.allgather(array)
            return
        # max and min lose nothing in the wider type, and prod gains.
        wide = array.astype(np.float32)
        self.allreduce(wide, op)
        array[...] = wide

    def _reduce_float16(self, array: Array, root: int, divisor: int) -> None:
        shard = self.reduce_scatter(array, divisor)
        if self.rank != root:
            self.send(shard, root)
            return
        for source, (begin, end) in enumerate(shard_bounds(array.size, self.size)):
            if source != root:
                self.recv(array[begin:end], source)


def _divide(array: Array, divisor: int) -> None:
    if divisor == 1:
        return
    if array.dtype.kind in "fc":
        np.divide(array, divisor, out=array)
    else:
        np.floor_divide(array, divisor, out=array)
