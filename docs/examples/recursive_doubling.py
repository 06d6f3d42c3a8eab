"""A communicator of your own, in one file: ``mpiexec -n 4 python recursive_doubling.py``."""

from __future__ import annotations

from typing import Any

import chainer
import numpy as np
from typing_extensions import override

import chainermn
from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase
from chainermn.communicators.route import Route
from chainermn.transport.reducer import Steps

TAG = 32767  # the highest that every MPI has: it must not be one that a user takes


# begin
class RecursiveDoublingCommunicator(MpiCommunicatorBase):
    """Exchanges sums with ranks at distance 1, 2, 4, ...: log2(size) steps.

    R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in
    MPICH", 2005, section 4.5.

    Raises
    ------
    ValueError
        On every rank, if their number is not a power of two.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        if self.size & (self.size - 1):
            raise ValueError(f"expected 1, 2, 4, 8, ... ranks, got {self.size}")

    @override
    def _exchange_in_steps(self, buffer: np.ndarray, route: Route) -> Steps:
        # These casts take note of overflows, which all ranks then raise.
        casts = route.reducers.everyone.adder.casts
        sent, received = np.empty((2, buffer.size), route.wire_dtype or buffer.dtype)
        distance = 1
        while distance < self.size:
            peer = self.rank ^ distance
            casts.copy(buffer, sent)
            # As bytes, for MPI knows no bfloat16.
            receiving = self.mpi_comm.Irecv(received.view(np.uint8), peer, TAG)
            sending = self.mpi_comm.Isend(sent.view(np.uint8), peer, TAG)
            yield receiving
            yield sending
            # Not `buffer += received`: all ranks have to add up the same rounded numbers.
            np.add(sent, received, buffer, dtype=buffer.dtype)
            distance *= 2
        buffer /= route.divisor


# end


def main() -> None:
    world = chainermn.create_communicator("naive").mpi_comm
    size = world.size
    model = chainer.links.Linear(3, 2)
    # 1 + 2 ** -12 has too many digits for 16 bits.
    for dtype, rounded in ((None, 1 + 2**-12), ("bfloat16", 1), ("float16", 1)):
        comm = RecursiveDoublingCommunicator(world, allreduce_grad_dtype=dtype)
        model.W.grad = np.full((2, 3), (1 + 2**-12) * 2.0**comm.rank, np.float32)
        model.b.grad = np.full(2, comm.rank, np.float32)
        comm.multi_node_mean_grad(model)
        np.testing.assert_array_equal(model.W.grad, rounded * (2.0**size - 1) / size)
        np.testing.assert_array_equal(model.b.grad, (size - 1) / 2)
    print("exact")

    if comm.rank == 0:
        model.b.grad[:] = 1e5
    try:
        comm.multi_node_mean_grad(model)
    except OverflowError:
        print("overflow")


if __name__ == "__main__":
    main()
