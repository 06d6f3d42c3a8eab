"""Collectives that exchange buckets, for any communicator."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeAlias

import numpy as np

from chainermn.transport.gpu.device import on_gpu, the_gpu
from chainermn.transport.host.mpi_reducer import MpiReducer
from chainermn.transport.reducer import Array, Pending, Steps

#: ``allreduce(buffer, divisor)`` replaces a buffer with its sum over the ranks, divided.
AllReduce: TypeAlias = Callable[[Array, int], Steps]


class Collectives:
    """Non-blocking collectives among all ranks.

    Parameters
    ----------
    allreduce : callable
        All-reduce of the communicator.
    messages : MpiReducer
        Transport for payloads that cannot be summed.

    Attributes
    ----------
    adder : Adder
        Adder that casts in host memory and records overflows.
    """

    def __init__(self, allreduce: AllReduce, messages: MpiReducer) -> None:
        self.rank = messages.rank
        self.size = messages.size
        self._allreduce = allreduce
        self.adder = messages.adder
        self._messages = messages

    def sum(self, buffer: Array) -> Steps:
        """Replace a buffer with its sum over the ranks."""
        return self._allreduce(buffer, 1)

    def mean(self, buffer: Array) -> Steps:
        """Replace a buffer with its mean over the ranks."""
        return self._allreduce(buffer, self.size)

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
