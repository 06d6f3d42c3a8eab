"""A stand-in for NCCL and for CuPy's NCCL module, made of MPI."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from mpi4py import MPI

if TYPE_CHECKING:
    from stand_in_gpu import StandInGpu

WORLD = MPI.COMM_WORLD

# CuPy 14.2 ends here; NCCL also has 7, ncclInProgress, and 8, ncclTimeout.
_ERRORS = {
    1: "NCCL_ERROR_UNHANDLED_CUDA_ERROR: unhandled cuda error",
    2: "NCCL_ERROR_SYSTEM_ERROR: unhandled system error",
    3: "NCCL_ERROR_INTERNAL_ERROR: internal error",
    4: "NCCL_ERROR_INVALID_ARGUMENT: invalid argument",
    5: "NCCL_ERROR_INVALID_USAGE: invalid usage",
    6: "NCCL_ERROR_REMOTE_ERROR: remote process exited or there was a network error",
}


def at(pointer: int, n: int, dtype: np.dtype) -> np.ndarray:
    """Return the memory at an address as an array."""
    raw = (ctypes.c_char * (n * dtype.itemsize)).from_address(int(pointer))
    return np.frombuffer(raw, dtype, n)


class StandInNccl:
    """The part of CuPy's NCCL module that chainermn uses."""

    NCCL_UINT8, NCCL_INT8, NCCL_INT32, NCCL_UINT32 = "uint8", "int8", "int32", "uint32"
    NCCL_INT64, NCCL_UINT64 = "int64", "uint64"
    NCCL_FLOAT16, NCCL_BFLOAT16, NCCL_FLOAT32 = "float16", "bfloat16", "float32"
    NCCL_FLOAT64 = "float64"
    NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN = np.add, np.multiply, np.maximum, np.minimum

    class NcclError(RuntimeError):
        """Like CuPy's: making one raises a KeyError if CuPy has no name for the error."""

        def __init__(self, status: int) -> None:
            self.status = status
            super().__init__(_ERRORS[status])

    def __init__(self, gpu: StandInGpu) -> None:
        self.gpu = gpu
        self.group: list[tuple[StandInNcclCommunicator, Callable[[], Any]]] | None = None
        self.made = 0
        self.open = 0
        self.ended: list[str] = []
        self.in_flight: list[StandInNcclCommunicator] = []
        self.has_launched = threading.Event()
        self.may_finish = threading.Event()  # kernels that are not on the default stream
        self.may_finish.set()
        self.before_destroying: Callable[[], Any] = lambda: None
        self.failing: dict[str, int] = {}
        self.asynchronous_error = 0

    def launch(
        self, name: str, communicator: StandInNcclCommunicator, call: Callable[[], Any]
    ) -> None:
        """Launch a kernel, which takes the whole GPU.

        It deadlocks if a kernel of another communicator has been launched and is not known to be
        over: either kernel may then come first, and the other one on another GPU.
        """
        others = [other for other in self.in_flight if other is not communicator]
        assert not others, f"deadlock: {name} beside a kernel of another communicator"
        self.in_flight.append(communicator)
        is_held = self.gpu.current() is not None

        def do() -> None:
            if is_held:
                self.may_finish.wait()
            call()
            self.in_flight.remove(communicator)

        self.gpu.begin(name, do)
        if is_held:
            self.has_launched.set()

    def check(self, name: str) -> None:
        """Raise an error if the call of this name is set to fail."""
        if status := self.failing.get(name, 0):
            raise self.NcclError(status)

    def get_unique_id(self) -> tuple[int, int]:
        self.check("get_unique_id")
        self.made += 1
        return WORLD.rank, self.made

    def groupStart(self) -> None:
        self.group = []

    def groupEnd(self) -> None:
        self.check("groupEnd")
        group, self.group = self.group, None
        if not group:  # the first call has failed
            return
        communicator = group[0][0]

        def do() -> None:
            for request in [call() for _, call in group]:
                if request is not None:
                    request.Wait()

        self.launch("a group", communicator, do)

    def NcclCommunicator(self, size: int, identity: tuple[int, int], rank: int) -> Any:
        self.check("NcclCommunicator")
        return StandInNcclCommunicator(self, size, identity, rank)


class StandInNcclCommunicator:
    def __init__(
        self, library: StandInNccl, size: int, identity: tuple[int, int], rank: int
    ) -> None:
        self._library = library
        first, number = identity
        tag = 1000 + number % 1000
        # Rank 0 tells the others who takes part: NCCL communicators involve no other ranks.
        if rank == 0:
            told = [WORLD.recv(source=MPI.ANY_SOURCE, tag=tag) for _ in range(size - 1)]
            world_ranks = [world for _, world in sorted([(0, first), *told])]
            for other in world_ranks[1:]:
                WORLD.send(world_ranks, other, tag)
        else:
            WORLD.send((rank, WORLD.rank), first, tag)
            world_ranks = WORLD.recv(source=first, tag=tag)
        assert len(world_ranks) == size
        self._comm = WORLD.Create_group(WORLD.group.Incl(world_ranks), tag)
        assert (self._comm.rank, self._comm.size) == (rank, size)
        library.open += 1

    def destroy(self) -> None:
        self._library.before_destroying()
        self._comm.Free()
        self._end("destroy")

    def abort(self) -> None:
        self._end("abort")  # without the other ranks

    def _end(self, how: str) -> None:
        self._library.open -= 1
        self._library.ended.append(how)

    def check_async_error(self) -> None:
        if status := self._library.asynchronous_error:
            raise self._library.NcclError(status)

    def allReduce(self, send, recv, n, dtype, op, stream):
        assert send == recv
        self._do("allReduce", stream, lambda: self._total(send, n, dtype, op, range(self._size)))

    def reduce(self, send, recv, n, dtype, op, root, stream):
        assert send == recv
        self._do("reduce", stream, lambda: self._total(send, n, dtype, op, [root]))

    def bcast(self, pointer, n, dtype, root, stream):
        self._do("bcast", stream, lambda: self._comm.Bcast(at(pointer, n, np.dtype(dtype)), root))

    def reduceScatter(self, send, recv, n, dtype, op, stream):
        assert recv == send + self._comm.rank * n * np.dtype(_number(dtype)).itemsize
        rank = self._comm.rank

        def reduce() -> None:
            whole = at(send, n * self._size, _number(dtype))
            own = self._sum(whole, op)
            whole[: rank * n], whole[(rank + 1) * n :] = 99, 99  # NCCL may leave anything there
            whole[rank * n : (rank + 1) * n] = own[rank * n : (rank + 1) * n]

        self._do("reduceScatter", stream, reduce)

    def allGather(self, send, recv, n, dtype, stream):
        assert send == recv + self._comm.rank * n
        whole = at(recv, n * self._size, np.dtype(dtype))
        self._do("allGather", stream, lambda: self._comm.Allgather(MPI.IN_PLACE, whole))

    def send(self, pointer, n, dtype, peer, stream):
        data = at(pointer, n, np.dtype(dtype))
        self._do("send", stream, lambda: self._comm.Isend(data, peer))

    def recv(self, pointer, n, dtype, peer, stream):
        data = at(pointer, n, np.dtype(dtype))
        self._do("recv", stream, lambda: self._comm.Irecv(data, peer))

    @property
    def _size(self) -> int:
        return self._comm.size

    def _do(self, name: str, stream: int, call: Callable[[], Any]) -> None:
        self._library.check(name)
        gpu = self._library.gpu
        assert stream == gpu.stream()
        if self._library.group is not None:
            gpu.log.append(name)
            self._library.group.append((self, call))
            return

        def do() -> None:
            if (request := call()) is not None:
                request.Wait()

        self._library.launch(name, self, do)

    def _total(self, pointer: int, n: int, dtype: str, op: Any, roots: Sequence[int]) -> None:
        array = at(pointer, n, _number(dtype))
        total = self._sum(array, op)
        array[:] = total if self._comm.rank in roots else 99

    def _sum(self, array: np.ndarray, op: Any) -> np.ndarray:
        everywhere = self._comm.allgather(array.copy())
        total = everywhere[0]
        for part in everywhere[1:]:
            with np.errstate(over="ignore"):
                total = op(total, part)
        return total


def _number(dtype: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, dtype, dtype))
