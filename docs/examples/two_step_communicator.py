"""A communicator of your own, in one file: ``mpiexec -n 4 python two_step_communicator.py``."""

from __future__ import annotations

import chainer
import numpy as np

import chainermn
from chainermn.communicators import MpiCommunicatorBase, register


class TwoStepCommunicator(MpiCommunicatorBase):
    """An all-reduce inside each host, then one between hosts for every rank of a host."""

    @classmethod
    def why_not(cls, topology):
        if len(set(topology.ranks_per_host)) > 1:
            return f"two_step needs as many ranks on every host, got {topology.ranks_per_host}"
        return ""

    @staticmethod
    def average(buffer, reducers, divisor, wire_dtype):
        yield from reducers.intra.allreduce(buffer, divisor)
        yield from reducers.inter.allreduce(buffer, wire_dtype=wire_dtype)


register("two_step", TwoStepCommunicator)


def main() -> None:
    comm = chainermn.create_communicator("two_step")
    model = chainer.links.Linear(3, 2)
    model.W.grad = np.full((2, 3), comm.rank, np.float32)
    model.b.grad = np.full(2, 2.0 * comm.rank, np.float32)
    comm.multi_node_mean_grad(model)
    np.testing.assert_array_equal(model.W.grad, (comm.size - 1) / 2)
    np.testing.assert_array_equal(model.b.grad, comm.size - 1)
    print("exact")


if __name__ == "__main__":
    main()
