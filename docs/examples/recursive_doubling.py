"""A communicator of one's own, in one file."""

from __future__ import annotations

from typing import Any

import chainer
import numpy as np
from typing_extensions import override

import chainermn
from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase
from chainermn.communicators.transport.reducer import Steps

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
    def _mean_in_steps(self, buffer: np.ndarray) -> Steps:
        received = np.empty_like(buffer)
        distance = 1
        while distance < self.size:
            peer = self.rank ^ distance
            receiving = self.mpi_comm.Irecv(received, peer, TAG)
            sending = self.mpi_comm.Isend(buffer, peer, TAG)
            yield receiving
            yield sending
            buffer += received
            distance *= 2
        buffer /= self.size


# end


def main() -> None:
    world = chainermn.create_communicator("naive").mpi_comm
    comm = RecursiveDoublingCommunicator(world)
    model = chainer.links.Linear(3, 2)
    model.W.grad = np.full((2, 3), 2.0**comm.rank, np.float32)
    model.b.grad = np.full(2, comm.rank, np.float32)
    comm.multi_node_mean_grad(model)
    size = comm.size
    np.testing.assert_array_equal(model.W.grad, (2.0**size - 1) / size)
    np.testing.assert_array_equal(model.b.grad, (size - 1) / 2)
    print("exact")


if __name__ == "__main__":
    main()
