"""Collectives on arrays in GPU memory, by NCCL, through CuPy."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from chainermn.transport.gpu.device import Gpu
from chainermn.transport.gpu.nccl_turns import wait_for_turn
from chainermn.transport.gpu.nccl_watch import the_watch
from chainermn.transport.host.mpi import Op
from chainermn.transport.reducer import Array, shard_bounds
from chainermn.transport.topology import host_name

if TYPE_CHECKING:
    from mpi4py import MPI

# Dtypes that NCCL does not have or that it rounds after each addition.
_WIDER = {"float16": "float32", "bfloat16": "float32", "int16": "int32", "uint16": "uint32"}

# NCCL's result codes that CuPy 14.2 does not know: creating their NcclError raises a KeyError.
_UNNAMED = {7: "ncclInProgress", 8: "ncclTimeout"}
_IN_PROGRESS = 7

# Setting this lets several ranks share a GPU, with NCCL 2.30 and newer.
_SHARED_GPU_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"


def check_devices(mpi_comm: MPI.Intracomm, gpu: Gpu) -> None:
    """Raise a RuntimeError on all ranks if two of them use the same GPU. Collective."""
    everywhere = mpi_comm.allgather((host_name(), gpu.device(), len(gpu.devices())))
    if os.environ.get(_SHARED_GPU_VARIABLE, "0") not in ("", "0"):
        return
    owners: dict[tuple[str, str], int] = {}
    for rank, (host, device, count) in enumerate(everywhere):
        owner = owners.setdefault((host, device), rank)
        if owner != rank:
            ranks = sum(other == host for other, _, _ in everywhere)
            raise RuntimeError(
                f"NCCL needs a GPU for each rank, but rank {rank} uses the same one as rank "
                f"{owner}, {device} of {host}. That host has {ranks} ranks, and rank {rank} sees "
                f"{count} {'GPU' if count == 1 else 'GPUs'}. Before the first exchange, let each "
                "rank choose its own GPU with chainermn.choose_device(comm). Do not start more "
                "ranks on a host than it has GPUs, or use the communicator 'naive'"
            )


class NcclTransport:
    """Collectives over the ranks of an MPI communicator, on arrays in GPU memory.

    Every array is one-dimensional and C-contiguous, and has the same length and dtype on all
    ranks. A call enqueues work on the current stream and returns; results replace the contents of
    ``array`` when the stream has done that work. Creating a transport is collective; each rank
    must have chosen its GPU.

    Raises
    ------
    RuntimeError
        If the ranks cannot connect: on all of them, with NCCL's message. Every method also raises
        it if NCCL fails.
    """

    def __init__(self, mpi_comm: MPI.Intracomm, gpu: Gpu) -> None:
        self.rank: int = mpi_comm.rank
        self.size: int = mpi_comm.size
        self._gpu = gpu
        self._nccl = gpu.nccl()
        wait_for_turn()
        identity = error = None
        if self.rank == 0:
            identity, error = _attempt(self._nccl.get_unique_id)
        identity, error = mpi_comm.bcast((identity, error))
        if error is None:
            connect = self._nccl.NcclCommunicator
            self._comm, error = _attempt(lambda: connect(self.size, identity, self.rank))
        errors = mpi_comm.allgather((host_name(), error))
        for rank, (host, each) in enumerate(errors):
            if each is not None:
                raise RuntimeError(
                    f"NCCL cannot connect {self.size} ranks. Rank {rank}, on {host}, failed with "
                    f"{each}. Set NCCL_DEBUG=INFO to see more"
                )
        self._is_open = True
        self._has_failed = False
        self._closing = threading.Lock()
        the_watch().add(self)

    def allreduce(self, array: Array, op: Op = "sum") -> None:
        """Reduce the arrays of all ranks elementwise; every rank gets the result.

        Elements are integers or floats; 16-bit elements are reduced in 32 bits.
        """
        wider = _WIDER.get(array.dtype.name)
        if wider is not None:
            wide = array.astype(wider)
            self.allreduce(wide, op)
            array[...] = wide.astype(array.dtype)
            return
        self.combine(array, op)
        if op == "mean":
            array /= self.size

    def combine(self, array: Array, op: Op = "sum") -> None:
        """Reduce as NCCL does, which rounds to the dtype of ``array`` after each addition."""
        pointer, dtype = self._gpu.pointer(array), self._dtype(array)
        nccl_op = getattr(self._nccl, "NCCL_SUM" if op == "mean" else f"NCCL_{op.upper()}")
        self._call("allReduce", pointer, pointer, array.size, dtype, nccl_op)

    def reduce(self, array: Array, root: int = 0) -> None:
        """Give ``root`` the sum of the arrays; elsewhere ``array`` becomes undefined."""
        pointer, dtype = self._gpu.pointer(array), self._dtype(array)
        self._call("reduce", pointer, pointer, array.size, dtype, self._nccl.NCCL_SUM, root)

    def bcast(self, array: Array, root: int = 0) -> None:
        """Give every rank the array of ``root``."""
        self._move("bcast", array, root)

    def reduce_scatter(self, array: Array) -> Array:
        """Give each rank its shard of the sum, a view; the rest of ``array`` becomes undefined."""
        bounds = shard_bounds(array.size, self.size)
        begin, end = bounds[self.rank]
        shard = array[begin:end]
        if array.size % self.size:  # NCCL's reduce-scatter requires shards of equal length
            with self._group():
                for root, (first, last) in enumerate(bounds):
                    self.reduce(array[first:last], root)
            return shard
        pointers = self._gpu.pointer(array), self._gpu.pointer(shard)
        dtype = self._dtype(array)
        self._call("reduceScatter", *pointers, shard.size, dtype, self._nccl.NCCL_SUM)
        return shard

    def allgather(self, array: Array) -> None:
        """Give every rank the shards of all ranks: the reverse of :meth:`reduce_scatter`."""
        bounds = shard_bounds(array.size, self.size)
        if array.size % self.size:
            with self._group():
                for root, (first, last) in enumerate(bounds):
                    self.bcast(array[first:last], root)
            return
        begin, end = bounds[self.rank]
        shard = array[begin:end]
        pointers = self._gpu.pointer(shard), self._gpu.pointer(array)
        self._call("allGather", *pointers, shard.nbytes, self._nccl.NCCL_UINT8)

    def send(self, array: Array, dest: int) -> None:
        """Send ``array`` to ``dest``, which calls :meth:`recv`."""
        self._move("send", array, dest)

    def recv(self, array: Array, source: int) -> None:
        """Receive ``array`` from ``source``, which calls :meth:`send`."""
        self._move("recv", array, source)

    def sendrecv(self, array: Array, dest: int, into: Array, source: int) -> None:
        """Send ``array`` to ``dest`` while receiving ``into`` from ``source``."""
        with self._group():
            self.send(array, dest)
            self.recv(into, source)

    def close(self) -> None:
        """Close NCCL's communicator. The transport cannot be used afterwards."""
        has_failed = self.failure() is not None or self._has_failed
        with self._closing:
            self._is_open = False
        # Not under the lock, so that the watch never waits for this: destroying waits for the
        # other ranks, even dead ones.
        if has_failed:
            self._comm.abort()
        else:
            self._comm.destroy()

    def failure(self) -> str | None:
        """Return the error of an earlier call that has failed by now, or None. For any thread."""
        with self._closing:
            try:
                if self._is_open:
                    self._check_earlier_calls()
            except RuntimeError as error:
                return str(error)
        return None

    @contextmanager
    def _group(self) -> Iterator[None]:
        """Let NCCL launch the calls in the ``with`` block together."""
        self._nccl.groupStart()
        try:
            yield
        finally:
            self.check("a group of calls", self._nccl.groupEnd)

    def _move(self, name: str, array: Array, other: int) -> None:
        self._call(name, self._gpu.pointer(array), array.nbytes, self._nccl.NCCL_UINT8, other)

    def _call(self, name: str, *arguments: Any) -> None:
        wait_for_turn()
        self._check_earlier_calls()
        method = getattr(self._comm, name)
        self.check(name, lambda: method(*arguments, self._gpu.stream()))

    def _check_earlier_calls(self) -> None:
        """Raise an error that NCCL has found since an earlier call, on this or another rank."""

        def check() -> None:
            try:
                self._comm.check_async_error()
            except KeyError as error:
                if error.args != (_IN_PROGRESS,):
                    raise

        self.check("an earlier call", check)

    def check(self, what: str, call: Callable[[], Any]) -> None:
        """Make a call; raise a RuntimeError with its name and this rank if NCCL fails."""
        try:
            call()
        except (self._nccl.NcclError, KeyError) as error:
            self._has_failed = True
            raise RuntimeError(
                f"NCCL failed in {what} on rank {self.rank} of {self.size}, on {host_name()}: "
                f"{_name(error)}. Set NCCL_DEBUG=INFO to see more"
            ) from error

    def _dtype(self, array: Array) -> Any:
        dtype = getattr(self._nccl, f"NCCL_{array.dtype.name.upper()}", None)
        if dtype is None:
            raise TypeError(f"NCCL cannot sum arrays of {array.dtype.name}")
        return dtype


def _attempt(call: Callable[[], Any]) -> tuple[Any, str | None]:
    try:
        return call(), None
    except KeyError as error:
        return None, _name(error)
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _name(error: Exception) -> str:
    """Return the message of an NcclError, or of the KeyError that replaces it."""
    if not isinstance(error, KeyError):
        return str(error)
    (status,) = error.args
    if status == _IN_PROGRESS:
        return (
            f"{_UNNAMED[status]} ({status}): NCCL's calls return before they are done, which "
            "ChainerMN does not support; unset NCCL_COMM_BLOCKING"
        )
    return f"{_UNNAMED[status]} ({status})" if status in _UNNAMED else f"error {status}"
