"""Arrays and objects over MPI, and the template of a gradient exchange."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import numpy as np

from chainermn.agreement import (
    Refusal,
    agree,
    attempt,
    check_equal,
    raise_refusals,
)
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.communicators.messages import (
    Array,
    ArrayParcel,
    Arrays,
    Parcel,
    PickleParcel,
    as_tuple,
)
from chainermn.communicators.route import Route
from chainermn.failures.activity import Group, marked, waiting
from chainermn.gradients.buckets import Buckets
from chainermn.gradients.gpu_buckets import GpuBuckets
from chainermn.gradients.overflow import check_overflow
from chainermn.gradients.overlap.exchange import OverlappedExchange
from chainermn.gradients.parameters import (
    agree_on_gradients,
    bcast_parameters,
    divide_by_memory,
)
from chainermn.gradients.wire_dtype import as_wire_dtype, choose_wire_dtype
from chainermn.transport.gpu.device import on_gpu, the_gpu
from chainermn.transport.gpu.mpi import GpuMpiTransport
from chainermn.transport.gpu.nccl import NcclTransport
from chainermn.transport.gpu.reducers import GpuReducers
from chainermn.transport.host.casts import FLOAT16
from chainermn.transport.host.mpi import MpiTransport, Op, load_mpi
from chainermn.transport.host.reducers import Reducers
from chainermn.transport.reducer import Steps
from chainermn.transport.topology import Topology

if TYPE_CHECKING:
    from typing import Self

    import chainer
    from mpi4py import MPI
    from numpy.typing import DTypeLike

Carrier: TypeAlias = MpiTransport | GpuMpiTransport | NcclTransport

# Measured: on one host, larger ones only cost the time to copy them; on a link of 1 Gbit/s,
# smaller ones cost latency.
_BUCKET_BYTES_ON_ONE_HOST = 1 << 18
_BUCKET_BYTES = 1 << 22


@marked
class MpiCommunicatorBase(CommunicatorBase):
    """What all communicators share; an algorithm adds :meth:`_exchange_in_steps`.

    Parameters
    ----------
    mpi_comm : mpi4py.MPI.Intracomm
        Its ranks take part.
    allreduce_grad_dtype : {'float16', 'bfloat16', 'float32', 'float64', 'auto'}, optional
        Dtype of gradients on the wire; that of the gradients by default.
    batched_copy : bool
        Accepted for scripts written for the original: copies are always batched.
    topology : Topology, optional
        Which ranks share a host; asked from MPI by default.
    """

    #: Gradients are gathered into buffers of at most this many bytes; 0: one a parameter. By
    #: default so many that on one host they stay in the cache, and on several time is not lost.
    #: Those in GPU memory are all gathered into one, but with 0.
    _bucket_bytes: float | None = None

    #: Whether an all-reduce of GPU memory among all ranks goes by NCCL; by MPI otherwise.
    _everyone_by_nccl = True

    #: Whether MPI may be given GPU memory, if it can read it.
    _may_be_direct = True

    def __init__(
        self,
        mpi_comm: MPI.Intracomm,
        *,
        allreduce_grad_dtype: DTypeLike | None = None,
        batched_copy: bool = True,
        topology: Topology | None = None,
    ) -> None:
        self.mpi_comm = mpi_comm
        self._group = Group(mpi_comm)
        self._owned: list[MPI.Comm] = []
        with self.config_scope():
            self.allreduce_grad_dtype = allreduce_grad_dtype
            self.batched_copy = batched_copy
        self._topology = topology or Topology.of(mpi_comm)
        self._transport = MpiTransport(mpi_comm)
        self._reducers = Reducers(mpi_comm, self._topology)
        limit = self._bucket_bytes
        if limit is None:
            limit = _BUCKET_BYTES if self.inter_size > 1 else _BUCKET_BYTES_ON_ONE_HOST
        self._buckets = Buckets(limit)

    @cached_property
    def _gpu_reducers(self) -> GpuReducers:
        return GpuReducers(
            self.mpi_comm,
            self._topology,
            the_gpu(),
            self._reducers,
            everyone_by_nccl=self._everyone_by_nccl,
            may_be_direct=self._may_be_direct,
        )

    @cached_property
    def _gpu_buckets(self) -> GpuBuckets:
        return GpuBuckets(the_gpu(), self.size, one_each=self._bucket_bytes == 0)

    @property
    def allreduce_grad_dtype(self) -> np.dtype[Any] | Literal["auto"] | None:
        """Dtype of gradients on the wire; None: their own; ``'auto'``: not chosen yet."""
        return self._chosen_dtype

    @allreduce_grad_dtype.setter
    def allreduce_grad_dtype(self, dtype: DTypeLike | Literal["auto"] | None) -> None:
        self._chosen_dtype = as_wire_dtype(dtype)

    @property
    def _wire_dtype(self) -> np.dtype[Any] | None:
        return None if self._chosen_dtype == "auto" else self._chosen_dtype

    @property
    def _gpu_wire_dtype(self) -> np.dtype[Any] | None:
        """That of gradients in GPU memory."""
        return self._wire_dtype

    @property
    def rank(self) -> int:
        return self._topology.rank

    @property
    def size(self) -> int:
        return self._topology.size

    @property
    def intra_rank(self) -> int:
        return self._topology.intra_rank

    @property
    def intra_size(self) -> int:
        return self._topology.intra_size

    @property
    def inter_rank(self) -> int:
        return self._topology.inter_rank

    @property
    def inter_size(self) -> int:
        return self._topology.inter_size

    def split(self, color: int, key: int) -> Self:
        refusals = self.mpi_comm.allgather(attempt(lambda: _check_split(color, key)))
        raise_refusals(dict(enumerate(refusals)), "split")
        part = cast("MPI.Intracomm", self.mpi_comm.Split(color, key))
        hosts = [str(node) for node in part.allgather(self.inter_rank)]
        communicator = type(self)(part, topology=Topology.from_hosts(hosts, part.rank))
        communicator._owned.append(part)
        for name, value in self.get_config().items():
            with communicator.config_scope():
                setattr(communicator, name, value)
        return communicator

    def finalize(self) -> None:
        if "_gpu_reducers" in self.__dict__:
            self._gpu_reducers.free()
        self._reducers.free()
        while self._owned:
            self._owned.pop().Free()

    # ---- arrays ----

    def send(self, data: Arrays, dest: int, tag: int = 0) -> None:
        self._send(attempt(lambda: ArrayParcel(data)), dest, tag, "send")

    def recv(self, source: int, tag: int = 0) -> Any:
        return self._recv(source, tag, None, "recv")

    def bcast(self, x: Arrays | None, root: int = 0) -> Any:
        return self._bcast(lambda: ArrayParcel(cast(Arrays, x)), root, "bcast")

    def gather(self, x: Arrays, root: int = 0) -> tuple[Any, ...] | None:
        self._check_root(root, "gather")
        parcels = self._exchange_headers(attempt(lambda: ArrayParcel(x)), "gather")
        _check_dtypes([[parcel] for parcel in parcels], "gather")
        gathered = self._gather(parcels, root)
        return None if gathered is None else tuple(gathered)

    def allgather(self, x: Arrays) -> tuple[Any, ...]:
        parcels = self._exchange_headers(attempt(lambda: ArrayParcel(x)), "allgather")
        _check_dtypes([[parcel] for parcel in parcels], "allgather")
        return tuple(self._allgather(parcels))

    def scatter(self, xs: Sequence[Arrays] | Array | None, root: int = 0) -> Any:
        return self._scatter(xs, ArrayParcel, root, "scatter")

    def alltoall(self, xs: Sequence[Array]) -> tuple[Array, ...]:
        parcels = attempt(lambda: [_one_array(x) for x in self._one_each(xs)])
        headers = self._exchange_headers(parcels, "alltoall")
        _check_dtypes(headers, "alltoall")
        received = [row[self.rank] for row in headers]
        for step in range(1, self.size):
            dest, source = (self.rank + step) % self.size, (self.rank - step) % self.size
            (outgoing,), (into,) = headers[self.rank][dest].following, received[source].following
            self._carrier(into).exchange(outgoing, dest, into, source)
        return tuple(parcel.open() for parcel in received)

    def allreduce(self, x: Arrays, op: Op = "sum") -> Any:
        described = attempt(lambda: _describe_reduction(x, op))
        check_equal(self.mpi_comm, described, "allreduce")
        results = tuple(_copy(array) for array in as_tuple(x))
        for result in results:
            flat = result.reshape(-1)
            # MPI knows no maximum of bool.
            self._carrier(flat).allreduce(flat.view(np.uint8) if flat.dtype == bool else flat, op)
        return results if isinstance(x, list | tuple) else results[0]

    # ---- objects ----

    def send_obj(self, obj: Any, dest: int, tag: int = 0) -> None:
        self._send(attempt(lambda: PickleParcel(obj)), dest, tag, "send_obj")

    def recv_obj(self, source: int, status: Any = None, tag: int | None = None) -> Any:
        return self._recv(source, tag, status, "recv_obj")

    def bcast_obj(self, obj: Any, max_buf_len: int | None = None, root: int = 0) -> Any:
        return self._bcast(lambda: PickleParcel(obj), root, "bcast_obj")

    def gather_obj(self, obj: Any, root: int = 0) -> list[Any] | None:
        self._check_root(root, "gather_obj")
        parcels = self._exchange_headers(attempt(lambda: PickleParcel(obj)), "gather_obj")
        return self._gather(parcels, root)

    def allgather_obj(self, obj: Any) -> list[Any]:
        parcels = self._exchange_headers(attempt(lambda: PickleParcel(obj)), "allgather_obj")
        return self._allgather(parcels)

    def scatter_obj(self, objs: Sequence[Any] | None, root: int = 0) -> Any:
        return self._scatter(objs, PickleParcel, root, "scatter_obj")

    def allreduce_obj(self, obj: Any) -> Any:
        parcels = self._exchange_headers(attempt(lambda: PickleParcel(obj)), "allreduce_obj")
        return functools.reduce(operator.add, self._allgather(parcels))

    # ---- models ----

    def bcast_data(self, model: chainer.Link) -> None:
        bcast_parameters(self._transport, self._carrier, model)

    def multi_node_mean_grad(self, model: chainer.Link, zero_fill: bool = False) -> None:
        parameters, _ = self._agree(model, zero_fill)
        if self.size == 1:
            return
        in_host_memory, in_gpu_memory = divide_by_memory(parameters)
        if in_gpu_memory:
            self._average_on_gpu(in_gpu_memory)
        for buffer in self._buckets.exchange(in_host_memory):
            self._allreduce_mean(buffer)
        if in_host_memory or not in_gpu_memory:
            self._check_overflow(model)

    def _agree(
        self, model: chainer.Link, zero_fill: bool, flags: Sequence[bool] = ()
    ) -> tuple[list[chainer.Parameter], tuple[bool, ...]]:
        """Return the parameters to exchange, and which of ``flags`` are true on any rank.

        Collective. Also chooses the dtype on the wire where that is left to the communicator.
        """
        agreed = agree_on_gradients(
            self._transport, model, zero_fill, self._chosen_dtype or self._gpu_wire_dtype, flags
        )
        if self._chosen_dtype == "auto":
            self._chosen_dtype = choose_wire_dtype(self)
        return agreed

    def _check_overflow(self, model: chainer.Link) -> None:
        """Raise on all ranks if a gradient has become infinite on the wire. Collective."""
        if self.size > 1 and self._wire_dtype == FLOAT16:
            check_overflow(self.mpi_comm, model, self._reducers.take_overflow())

    def _allreduce_mean(self, buffer: Array) -> None:
        """Replace the elements of ``buffer`` by their means over the ranks."""
        for pending in self._mean_in_steps(buffer):
            pending.Wait()

    def _mean_in_steps(self, buffer: Array) -> Steps:
        """Do what `_allreduce_mean` does, yielding what it has to wait for.

        It does not wait itself, so that several can be under way. But the first one of a
        communicator sets up what it needs together with the other ranks.
        """
        return self._exchange_in_steps(buffer, Route(self._reducers, self.size, self._wire_dtype))

    def _exchange_in_steps(self, buffer: Array, route: Route) -> Steps:
        """Make the elements of ``buffer`` their sums over the ranks, divided: the algorithm.

        Parameters
        ----------
        buffer : array of shape (n,)
            Of the same length and dtype on all ranks; in GPU memory if the route is for that.
        route : Route
        """
        raise NotImplementedError

    def _average_on_gpu(self, parameters: Sequence[chainer.Parameter]) -> None:
        """Replace gradients in GPU memory by their means over the ranks."""
        for buffer in self._gpu_buckets.exchange(parameters, self._gpu_wire_dtype):
            for pending in self._sum_on_gpu_in_steps(buffer):
                pending.Wait()

    def _sum_on_gpu_in_steps(self, buffer: Array) -> Steps:
        """Replace the elements of ``buffer`` by their sums, as `_mean_in_steps` by their means.

        The kernel that hands gradients in GPU memory back divides them.
        """
        return self._exchange_in_steps(buffer, Route(self._gpu_reducers, 1, None))

    def _any_of_each(self, flags: Sequence[bool], where: str) -> Sequence[bool]:
        # Of what `allreduce` does, all that takes time is left out.
        with waiting(self._group.stream, where, self._group.members):
            return agree(self.mpi_comm, where, flags)[1]

    def create_overlapped_exchange(self) -> OverlappedExchange:
        return OverlappedExchange(self)

    # ---- parcels ----

    def _send(self, parcel: Parcel | Refusal, dest: int, tag: int, where: str) -> None:
        self.mpi_comm.send(parcel, dest, tag)
        if isinstance(parcel, Refusal):
            raise parcel.kind(f"{where} to rank {dest}: rank {self.rank}: {parcel.message}")
        for part in parcel.following:
            self._messenger(part).send(part, dest, tag)

    def _recv(self, source: int, tag: int | None, status: Any, where: str) -> Any:
        mpi = load_mpi()
        status = mpi.Status() if status is None else status
        parcel = self.mpi_comm.recv(None, source, mpi.ANY_TAG if tag is None else tag, status)
        source, tag = status.Get_source(), status.Get_tag()
        if isinstance(parcel, Refusal):
            raise parcel.kind(f"{where} on rank {self.rank}: rank {source}: {parcel.message}")
        for part in parcel.following:
            self._messenger(part).recv(part, source, tag)
        return parcel.open()

    def _bcast(self, make: Callable[[], Parcel], root: int, where: str) -> Any:
        self._check_root(root, where)
        parcel = attempt(make) if self.rank == root else None
        header = self.mpi_comm.bcast(parcel, root)
        raise_refusals({root: header}, where)
        here: Any = parcel if self.rank == root else header
        for part in here.following:
            self._carrier(part).bcast(part, root)
        return here.open()

    def _exchange_headers(self, own: Any, where: str) -> list[Any]:
        """Return what every rank has to send: headers, but ``own`` for this rank."""
        headers = self.mpi_comm.allgather(own)
        raise_refusals(dict(enumerate(headers)), where)
        headers[self.rank] = own
        return headers

    def _gather(self, parcels: list[Any], root: int) -> list[Any] | None:
        if self.rank != root:
            for part in parcels[self.rank].following:
                self._carrier(part).send(part, root)
            return None
        for source, parcel in enumerate(parcels):
            if source != root:
                for part in parcel.following:
                    self._carrier(part).recv(part, source)
        return [parcel.open() for parcel in parcels]

    def _allgather(self, parcels: list[Any]) -> list[Any]:
        for owner, parcel in enumerate(parcels):
            for part in parcel.following:
                self._carrier(part).bcast(part, owner)
        return [parcel.open() for parcel in parcels]

    def _scatter(self, xs: Any, kind: Callable[[Any], Parcel], root: int, where: str) -> Any:
        self._check_root(root, where)
        parcels: Any = None
        if self.rank == root:
            parcels = attempt(lambda: _parcels(kind, self._one_each(xs)))
        refusal = self.mpi_comm.bcast(parcels if isinstance(parcels, Refusal) else None, root)
        raise_refusals({root: refusal}, where)
        header = self.mpi_comm.scatter(parcels, root)
        if self.rank != root:
            for part in header.following:
                self._carrier(part).recv(part, root)
            return header.open()
        for dest, parcel in enumerate(parcels):
            if dest != root:
                for part in parcel.following:
                    self._carrier(part).send(part, dest)
        return parcels[root].open()

    def _check_root(self, root: int, where: str) -> None:
        def describe() -> str:
            if root not in range(self.size):
                raise ValueError(f"root must be a rank, 0 to {self.size - 1}, got {root!r}")
            return f"root={root}"

        check_equal(self.mpi_comm, attempt(describe), where)

    def _carrier(self, part: Array) -> Carrier:
        """Return what carries a part of a parcel in a call of all ranks."""
        return self._gpu_reducers.mpi if on_gpu(part) else self._transport

    def _messenger(self, part: Array) -> MpiTransport | GpuMpiTransport:
        """Return what carries a part of a parcel from one rank to another."""
        return self._gpu_reducers.point_to_point if on_gpu(part) else self._transport

    def _one_each(self, xs: Any) -> Any:
        is_sequence = isinstance(xs, list | tuple | np.ndarray) or on_gpu(xs)
        if not is_sequence or getattr(xs, "ndim", 1) == 0:
            raise TypeError(f"expected a sequence with one entry a rank, got {type(xs)}")
        if len(xs) != self.size:
            raise ValueError(f"expected {self.size} entries, one a rank, got {len(xs)}")
        return xs


def _copy(array: Array) -> Array:
    """Return a copy that is contiguous, and that MPI can calculate with."""
    if on_gpu(array):
        return array.copy(order="C")
    # In the byte order of this machine, the only one that MPI can calculate with.
    return np.array(array, array.dtype.newbyteorder("="), order="C")


def _one_array(x: Array) -> ArrayParcel:
    parcel = ArrayParcel(x)
    if parcel.is_tuple:
        raise TypeError("expected an array for each rank, got a tuple or list")
    return parcel


def _parcels(kind: Callable[[Any], Parcel], xs: Any) -> list[Parcel]:
    parcels = [kind(x) for x in xs]
    if len({getattr(parcel, "on_gpu", False) for parcel in parcels}) > 1:
        raise TypeError("expected arrays of one kind, got some of NumPy's and some of CuPy's")
    return parcels


def _check_dtypes(rows: Sequence[Sequence[ArrayParcel]], where: str) -> None:
    """Raise unless all parcels, a row from each rank, hold the same dtypes."""
    if (
        len({(parcel.is_tuple, parcel.on_gpu, *parcel.dtypes) for row in rows for parcel in row})
        > 1
    ):
        shown = "; ".join(
            f"rank {rank}: {', '.join(map(str, row))}" for rank, row in enumerate(rows)
        )
        raise ValueError(
            f"{where}: all ranks must give the same dtypes, all in host memory or all in GPU "
            f"memory, got: {shown}"
        )


def _check_split(color: int, key: int) -> None:
    # What a C int holds; MPI takes no negative color.
    for name, number, least in (("color", color, 0), ("key", key, -(2**31))):
        if not (isinstance(number, int | np.integer) and least <= number < 2**31):
            raise ValueError(
                f"{name} must be an integer from {least} to {2**31 - 1}, got {number!r}"
            )


def _describe_reduction(data: Arrays, op: Op) -> str:
    described = ArrayParcel(data)
    if op not in ("sum", "mean", "max", "min", "prod"):
        raise ValueError(f"op must be 'sum', 'mean', 'max', 'min' or 'prod', got {op!r}")
    for dtype in described.dtypes:
        if op == "mean" and dtype.kind not in "fc":
            raise TypeError(f"the mean of {dtype} is not one; cast to a float dtype before")
        if dtype.kind == "c" and op in ("max", "min"):
            raise TypeError(f"op {op!r} of {dtype}: complex numbers have no order")
        if dtype.kind == "b" and op not in ("max", "min"):
            raise TypeError(f"op {op!r} of bool: cast to an integer, or use 'max' or 'min'")
    return f"{described}, op={op!r}"
