"""Average buffers by an algorithm, and exchange payloads that cannot be summed."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from chainermn.transport.gpu.device import on_gpu, the_gpu
from chainermn.transport.host.mpi_reducer import MpiReducer
from chainermn.transport.reducer import Array, Pending, Reducers, Steps

if TYPE_CHECKING:
    from chainermn.transport.topology import Topology


def wait_for(steps: Steps) -> None:
    """Run a non-blocking collective until it is complete."""
    for pending in steps:
        pending.Wait()


class Algorithm:
    """A way to average gradients; by default, one all-reduce among all ranks for each bucket.

    The class of a communicator is an algorithm. It sets these attributes and, if necessary,
    overrides :meth:`average` and :meth:`why_not`. The exchange of gradients uses nothing else of
    it.
    """

    #: Largest size of a bucket in host memory, in bytes. 0 means one bucket per parameter, also in
    #: GPU memory. Otherwise, all gradients in GPU memory share one bucket. By default, buckets are
    #: small enough for the cache on one host, and large enough to hide latency on several hosts.
    bucket_bytes: ClassVar[float | None] = None

    #: Whether an all-reduce of GPU memory among all ranks uses NCCL; otherwise it uses MPI.
    everyone_by_nccl: ClassVar[bool] = True

    #: Whether only NCCL sends arrays in GPU memory. The wire dtype of their gradients is then
    #: ``chainer.global_config.dtype`` by default.
    uses_nccl: ClassVar[bool] = False

    #: Whether only the nonzero rows of the gradients of embeddings are sent between hosts.
    sends_rows: ClassVar[bool] = True

    #: Whether ranks exchange anything, so that their models stay equal.
    exchanges: ClassVar[bool] = True

    #: Whether MPI may read and write GPU memory, except to add up, if ``CHAINERMN_CUDA_AWARE=1``
    #: says that it can.
    may_be_cuda_aware: ClassVar[bool] = True

    @classmethod
    def why_not(cls, topology: Topology) -> str:
        """Return why the algorithm cannot run on these hosts, or an empty string if it can.

        Parameters
        ----------
        topology : Topology
            Hosts and their ranks: the same on all ranks, except for the number of this rank.
        """
        return ""

    @staticmethod
    def average(
        buffer: Array, reducers: Reducers, divisor: int, wire_dtype: np.dtype[Any] | None
    ) -> Steps:
        """Replace a buffer by its sum over all ranks, divided by a number: the algorithm.

        This is a generator that yields each request it has to wait for, and never waits itself.
        So one thread can run several exchanges in turn.

        Parameters
        ----------
        buffer : array of shape (n,)
            Floats in host memory or GPU memory, with the same length and dtype on all ranks.
        reducers : Reducers
            Collectives for that memory.
        divisor : int
            Number to divide the sum by.
        wire_dtype : dtype or None
            Dtype to round to between hosts; None to round nothing.
        """
        return reducers.everyone.allreduce(buffer, divisor, wire_dtype)


class Collectives:
    """Non-blocking collectives among all ranks.

    Parameters
    ----------
    algorithm : type of Algorithm
        Way to average buffers.
    reducers : Reducers
        Reducers for the memory of the buffers.
    messages : MpiReducer
        Transport for payloads that cannot be summed.
    wire_dtype : dtype or None
        Dtype to round buffers to between hosts; None to round nothing.

    Attributes
    ----------
    adder : Adder
        Adder that casts in host memory and records overflows.
    """

    def __init__(
        self,
        algorithm: type[Algorithm],
        reducers: Reducers,
        messages: MpiReducer,
        wire_dtype: np.dtype[Any] | None,
    ) -> None:
        self.rank = messages.rank
        self.size = messages.size
        self.adder = messages.adder
        self._algorithm, self._reducers = algorithm, reducers
        self._messages, self._wire_dtype = messages, wire_dtype

    def sum(self, buffer: Array) -> Steps:
        """Replace a buffer with its sum over the ranks."""
        return self._algorithm.average(buffer, self._reducers, 1, self._wire_dtype)

    def mean(self, buffer: Array) -> Steps:
        """Replace a buffer with its mean over the ranks."""
        return self._algorithm.average(buffer, self._reducers, self.size, self._wire_dtype)

    def allgather(self, payload: Array) -> Generator[Pending, None, Array]:
        """Return the payloads of all ranks in host memory, one per row.

        Payloads are flat and have the same length and dtype on all ranks.
        """
        everywhere = np.empty((self.size, payload.size), payload.dtype)
        yield from _copy_to_host(payload, everywhere[self.rank])
        if self.size > 1:
            yield self._messages.iallgather(everywhere.reshape(-1))
        return everywhere

    def alltoall(self, payloads: Array) -> Generator[Pending, None, Array]:
        """Send row ``k`` to rank ``k``; return the rows from all ranks, in host memory."""
        given = np.empty(payloads.shape, payloads.dtype)
        yield from _copy_to_host(payloads.reshape(-1), given.reshape(-1))
        if self.size == 1:
            return given
        received = np.empty_like(given)
        received[self.rank] = given[self.rank]
        yield self._messages.ialltoall(given.reshape(-1), received)
        return received


def _copy_to_host(array: Array, host: Array) -> Steps:
    if on_gpu(array):
        gpu = the_gpu()
        gpu.copy_to_host(array, host)
        yield gpu.record()
    else:
        host[...] = array
