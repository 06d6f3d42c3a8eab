"""Send arrays, objects and models by MPI: the code that all communicators share."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import chainer
import numpy as np

from chainermn.agreement import (
    InputError,
    attempt,
    check_equal,
    check_root,
    raise_errors_of,
)
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.communicators.messages import (
    ArrayMessage,
    Arrays,
    Message,
    ObjectMessage,
    as_tuple,
    describe_array,
)
from chainermn.failures.activity import Group, collective, receives, sends
from chainermn.gradients.exchange import GradientExchange
from chainermn.gradients.parameters import bcast_parameters
from chainermn.gradients.persistents import bcast_persistents
from chainermn.gradients.wire_dtype import as_wire_dtype
from chainermn.transport.collectives import Algorithm
from chainermn.transport.gpu.available import why_no_nccl
from chainermn.transport.gpu.cuda_awareness import is_cuda_aware
from chainermn.transport.gpu.device import on_gpu
from chainermn.transport.gpu.nccl import NcclTransport
from chainermn.transport.gpu.transports import GpuMpiTransport, GpuTransports
from chainermn.transport.host.mpi import MpiTransport, Op, load_mpi
from chainermn.transport.reducer import Array
from chainermn.transport.topology import Topology

if TYPE_CHECKING:
    from typing import Self

    from mpi4py import MPI
    from numpy.typing import DTypeLike


class MpiCommunicatorBase(Algorithm, CommunicatorBase):
    """Base class of all communicators, with one all-reduce among all ranks for each bucket.

    A subclass is another `Algorithm`: it sets class attributes and, if necessary, overrides
    :meth:`average` and :meth:`why_not`.

    Parameters
    ----------
    mpi_comm : mpi4py.MPI.Intracomm
        MPI communicator of the ranks that take part.
    allreduce_grad_dtype : {'float16', 'bfloat16', 'float32', 'float64'}, optional
        Dtype in which gradients are sent; their own dtype by default.
    batched_copy : bool
        Ignored, because copies are always batched; accepted for scripts written for the original
        ChainerMN.
    topology : Topology, optional
        Hosts that the ranks run on; MPI knows them by default.

    Raises
    ------
    ValueError
        On every rank, if the algorithm cannot run on these hosts.
    RuntimeError
        On every rank, if the algorithm needs NCCL and a rank has none.
    """

    def __init__(
        self,
        mpi_comm: MPI.Intracomm,
        *,
        allreduce_grad_dtype: DTypeLike | None = None,
        batched_copy: bool = True,
        topology: Topology | None = None,
    ) -> None:
        self.mpi_comm = mpi_comm
        self._topology = topology or Topology.of(mpi_comm)
        self._check_ranks()
        #: These ranks, as the watch knows them.
        self.group = Group(mpi_comm)
        self._split_off: MPI.Intracomm | None = None
        self._agreed_layouts: set[str | InputError] = set()
        self._transport = MpiTransport(mpi_comm)
        may_be_cuda_aware = self.may_be_cuda_aware and is_cuda_aware()
        self._gpu_transports = GpuTransports(mpi_comm, is_cuda_aware=may_be_cuda_aware)
        #: The exchange of gradients, for optimizers.
        self.gradients = GradientExchange(
            mpi_comm, self._topology, self._gpu_transports, type(self), self.group
        )
        with self.config_scope():
            self.allreduce_grad_dtype = allreduce_grad_dtype
            self.batched_copy = batched_copy

    def _check_ranks(self) -> None:
        """Raise on all ranks if the algorithm cannot run on them. Collective."""
        if reason := self.why_not(self._topology):
            raise ValueError(reason)
        if self.uses_nccl:
            for rank, lacking in enumerate(self.mpi_comm.allgather(why_no_nccl())):
                if lacking:
                    raise RuntimeError(
                        f"NCCL needs a GPU for each rank: on rank {rank}, {lacking}. Without GPUs "
                        "call create_communicator() without a name"
                    )

    @property
    def allreduce_grad_dtype(self) -> np.dtype[Any] | None:
        """Dtype in which gradients are sent; None for their own dtype."""
        return self.gradients.wire_dtype

    @allreduce_grad_dtype.setter
    def allreduce_grad_dtype(self, dtype: DTypeLike | None) -> None:
        self.gradients.wire_dtype = as_wire_dtype(dtype)

    # ---- where this rank stands ----

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

    @collective
    def split(self, color: int, key: int) -> Self:
        errors = self.mpi_comm.allgather(attempt(lambda: _check_split(color, key)))
        raise_errors_of(dict(enumerate(errors)), "split")
        part = cast("MPI.Intracomm", self.mpi_comm.Split(color, key))
        hosts = [str(node) for node in part.allgather(self.inter_rank)]
        communicator = type(self)(part, topology=Topology.from_hosts(hosts, part.rank))
        communicator._split_off = part
        for name, value in self.get_config().items():
            with communicator.config_scope():
                setattr(communicator, name, value)
        return communicator

    @property
    def over_mpi(self) -> MpiCommunicatorBase:
        return self._over_mpi if self.uses_nccl else self

    @cached_property
    def _over_mpi(self) -> MpiCommunicatorBase:
        return MpiCommunicatorBase(self.mpi_comm, topology=self._topology)

    def finalize(self) -> None:
        if "_over_mpi" in self.__dict__:
            self._over_mpi.finalize()
        self.gradients.free()
        if self._split_off is not None:
            self._split_off.Free()
            self._split_off = None

    # ---- arrays ----

    def send(self, data: Arrays, dest: int, tag: int = 0) -> None:
        self._send(attempt(lambda: ArrayMessage(data)), dest, tag, "send")

    def recv(self, source: int, tag: int = 0) -> Any:
        return self._recv(source, tag, load_mpi().Status(), "recv")

    @collective
    def bcast(self, x: Arrays | None, root: int = 0) -> Any:
        return self._bcast(lambda: ArrayMessage(cast(Arrays, x)), root, "bcast")

    @collective
    def gather(self, x: Arrays, root: int = 0) -> tuple[Any, ...] | None:
        check_root(self.mpi_comm, root, "gather")
        messages = self._allgather_headers(attempt(lambda: ArrayMessage(x)), "gather")
        _check_dtypes([[message] for message in messages], "gather")
        gathered = self._gather(messages, root)
        return None if gathered is None else tuple(gathered)

    @collective
    def allgather(self, x: Arrays) -> tuple[Any, ...]:
        messages = self._allgather_headers(attempt(lambda: ArrayMessage(x)), "allgather")
        _check_dtypes([[message] for message in messages], "allgather")
        return tuple(self._allgather(messages))

    @collective
    def scatter(self, xs: Sequence[Arrays] | Array | None, root: int = 0) -> Any:
        return self._scatter(xs, ArrayMessage, root, "scatter")

    @collective
    def alltoall(self, xs: Sequence[Array]) -> tuple[Array, ...]:
        messages = attempt(lambda: [_one_array(x) for x in self._one_each(xs)])
        headers = self._allgather_headers(messages, "alltoall")
        _check_dtypes(headers, "alltoall")
        received = [row[self.rank] for row in headers]
        for step in range(1, self.size):
            dest, source = (self.rank + step) % self.size, (self.rank - step) % self.size
            (outgoing,), (into,) = headers[self.rank][dest].buffers, received[source].buffers
            self._transport_of(into).sendrecv(outgoing, dest, into, source)
        return tuple(message.open() for message in received)

    @collective
    def allreduce(self, x: Arrays, op: Op = "sum") -> Any:
        described = attempt(lambda: _describe_reduction(x, op))
        check_equal(self.mpi_comm, described, "allreduce")
        results = tuple(_copy(array) for array in as_tuple(x))
        for result in results:
            flat = result.reshape(-1)
            # MPI has no maximum of bool.
            self._transport_of(flat).allreduce(
                flat.view(np.uint8) if flat.dtype == bool else flat, op
            )
        return results if isinstance(x, list | tuple) else results[0]

    def agree_to_add_up(self, like: Array, error: InputError | None, where: str) -> None:
        layout = describe_array(like)
        if layout in self._agreed_layouts:
            raise_errors_of({self.rank: error}, where)
            return
        self._agree_on_layout(error or layout, where)
        if on_gpu(like):
            self._agreed_layouts.add(layout)

    @collective("allreduce")
    def _agree_on_layout(self, layout: str | InputError, where: str) -> None:
        check_equal(self.mpi_comm, layout, where)

    @collective("allreduce")
    def add_up(self, array: Array) -> Array:
        flat = array.reshape(-1)
        self._transport_of(flat).allreduce(flat)
        return flat.reshape(array.shape)

    # ---- objects ----

    def send_obj(self, obj: Any, dest: int, tag: int = 0) -> None:
        self._send(attempt(lambda: ObjectMessage(obj)), dest, tag, "send_obj")

    def recv_obj(self, source: int, status: Any = None, tag: int | None = None) -> Any:
        status = load_mpi().Status() if status is None else status
        return self._recv(source, tag, status, "recv_obj")

    @collective
    def bcast_obj(self, obj: Any, max_buf_len: int | None = None, root: int = 0) -> Any:
        return self._bcast(lambda: ObjectMessage(obj), root, "bcast_obj")

    @collective
    def gather_obj(self, obj: Any, root: int = 0) -> list[Any] | None:
        check_root(self.mpi_comm, root, "gather_obj")
        messages = self._allgather_headers(attempt(lambda: ObjectMessage(obj)), "gather_obj")
        return self._gather(messages, root)

    @collective
    def allgather_obj(self, obj: Any) -> list[Any]:
        messages = self._allgather_headers(attempt(lambda: ObjectMessage(obj)), "allgather_obj")
        return self._allgather(messages)

    @collective
    def scatter_obj(self, objs: Sequence[Any] | None, root: int = 0) -> Any:
        return self._scatter(objs, ObjectMessage, root, "scatter_obj")

    @collective
    def allreduce_obj(self, obj: Any) -> Any:
        messages = self._allgather_headers(attempt(lambda: ObjectMessage(obj)), "allreduce_obj")
        return functools.reduce(operator.add, self._allgather(messages))

    # ---- models ----

    @collective
    def bcast_data(self, model: chainer.Link, *, persistent: bool = False) -> None:
        check_equal(self.mpi_comm, f"persistent={bool(persistent)}", "bcast_data")
        bcast_parameters(self.mpi_comm, self._transport_of, model)
        if persistent:
            bcast_persistents(self, model)

    @collective
    def multi_node_mean_grad(self, model: chainer.Link, zero_fill: bool = False) -> None:
        self.gradients.mean(model, zero_fill)

    # ---- messages ----

    @sends
    def _send(self, message: Message | InputError, dest: int, tag: int, where: str) -> None:
        self.mpi_comm.send(message, dest, tag)
        if isinstance(message, InputError):
            raise message.kind(f"{where} to rank {dest}: rank {self.rank}: {message.message}")
        for part in message.buffers:
            self._point_to_point_of(part).send(part, dest, tag)

    @receives
    def _recv(self, source: int, tag: int | None, status: Any, where: str) -> Any:
        tag = load_mpi().ANY_TAG if tag is None else tag
        message = self.mpi_comm.recv(None, source, tag, status)
        source, tag = status.Get_source(), status.Get_tag()
        if isinstance(message, InputError):
            raise message.kind(f"{where} on rank {self.rank}: rank {source}: {message.message}")
        for part in message.buffers:
            self._point_to_point_of(part).recv(part, source, tag)
        return message.open()

    def _bcast(self, make: Callable[[], Message], root: int, where: str) -> Any:
        check_root(self.mpi_comm, root, where)
        message = attempt(make) if self.rank == root else None
        header = self.mpi_comm.bcast(message, root)
        raise_errors_of({root: header}, where)
        here: Any = message if self.rank == root else header
        for part in here.buffers:
            self._transport_of(part).bcast(part, root)
        return here.open()

    def _allgather_headers(self, own: Any, where: str) -> list[Any]:
        """Return the header of each rank's message; for this rank, ``own`` itself."""
        headers = self.mpi_comm.allgather(own)
        raise_errors_of(dict(enumerate(headers)), where)
        headers[self.rank] = own
        return headers

    def _gather(self, messages: list[Any], root: int) -> list[Any] | None:
        if self.rank != root:
            for part in messages[self.rank].buffers:
                self._transport_of(part).send(part, root)
            return None
        for source, message in enumerate(messages):
            if source != root:
                for part in message.buffers:
                    self._transport_of(part).recv(part, source)
        return [message.open() for message in messages]

    def _allgather(self, messages: list[Any]) -> list[Any]:
        for owner, message in enumerate(messages):
            for part in message.buffers:
                self._transport_of(part).bcast(part, owner)
        return [message.open() for message in messages]

    def _scatter(self, xs: Any, kind: Callable[[Any], Message], root: int, where: str) -> Any:
        check_root(self.mpi_comm, root, where)
        messages: Any = None
        if self.rank == root:
            messages = attempt(lambda: _messages(kind, self._one_each(xs)))
        failure = self.mpi_comm.bcast(messages if isinstance(messages, InputError) else None, root)
        raise_errors_of({root: failure}, where)
        header = self.mpi_comm.scatter(messages, root)
        if self.rank != root:
            for part in header.buffers:
                self._transport_of(part).recv(part, root)
            return header.open()
        for dest, message in enumerate(messages):
            if dest != root:
                for part in message.buffers:
                    self._transport_of(part).send(part, dest)
        return messages[root].open()

    def _transport_of(self, part: Array) -> MpiTransport | GpuMpiTransport | NcclTransport:
        """Return the transport for part of a message in a collective call."""
        # NCCL has no complex numbers. While it may exchange gradients in the background, it must
        # do nothing else, because one rank may be further in that exchange than another.
        by_nccl = self.uses_nccl and not self.gradients.has_duplicates
        if by_nccl and on_gpu(part) and part.dtype.kind != "c":
            return self._gpu_transports.nccl
        return self._point_to_point_of(part)

    def _point_to_point_of(self, part: Array) -> MpiTransport | GpuMpiTransport:
        """Return the transport for part of a message from one rank to another."""
        return self._gpu_transports.mpi if on_gpu(part) else self._transport

    def _one_each(self, xs: Any) -> Any:
        is_sequence = isinstance(xs, (list, tuple, *chainer.get_array_types()))
        if not is_sequence or getattr(xs, "ndim", 1) == 0:
            raise TypeError(f"expected a sequence with one entry per rank, got {type(xs)}")
        if len(xs) != self.size:
            raise ValueError(f"expected {self.size} entries, one per rank, got {len(xs)}")
        return xs


def _copy(array: Array) -> Array:
    """Return a contiguous copy that MPI can calculate with."""
    if on_gpu(array):
        return array.copy(order="C")
    # MPI can calculate only in the byte order of this machine.
    return np.array(array, array.dtype.newbyteorder("="), order="C")


def _one_array(x: Array) -> ArrayMessage:
    message = ArrayMessage(x)
    if message.is_tuple:
        raise TypeError("expected an array for each rank, got a tuple or list")
    return message


def _messages(kind: Callable[[Any], Message], xs: Any) -> list[Message]:
    messages = [kind(x) for x in xs]
    if len({getattr(message, "on_gpu", False) for message in messages}) > 1:
        raise TypeError("expected either NumPy or CuPy arrays, got some of both")
    return messages


def _check_dtypes(rows: Sequence[Sequence[ArrayMessage]], where: str) -> None:
    """Raise unless all messages, one row per rank, hold the same dtypes."""
    kinds = {(each.is_tuple, each.on_gpu, *each.dtypes) for row in rows for each in row}
    if len(kinds) > 1:
        shown = "; ".join(
            f"rank {rank}: {', '.join(map(str, row))}" for rank, row in enumerate(rows)
        )
        raise ValueError(
            f"{where}: all ranks must pass the same dtypes, all in host memory or all in GPU "
            f"memory, got: {shown}"
        )


def _check_split(color: int, key: int) -> None:
    # The range of a C int; MPI accepts no negative color.
    for name, number, least in (("color", color, 0), ("key", key, -(2**31))):
        if not (isinstance(number, int | np.integer) and least <= number < 2**31):
            raise ValueError(
                f"{name} must be an integer from {least} to {2**31 - 1}, got {number!r}"
            )


def _describe_reduction(data: Arrays, op: Op) -> str:
    described = ArrayMessage(data)
    if op not in ("sum", "mean", "max", "min", "prod"):
        raise ValueError(f"op must be 'sum', 'mean', 'max', 'min' or 'prod', got {op!r}")
    for dtype in described.dtypes:
        if op == "mean" and dtype.kind not in "fc":
            raise TypeError(f"op 'mean' needs floats, got {dtype}; cast to a float dtype first")
        if dtype.kind == "c" and op in ("max", "min"):
            raise TypeError(f"op {op!r} of {dtype}: complex numbers have no order")
        if dtype.kind == "b" and op not in ("max", "min"):
            raise TypeError(f"op {op!r} of bool: cast to an integer, or use 'max' or 'min'")
    return f"{described}, op={op!r}"
