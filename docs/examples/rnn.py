"""Train a recurrent network on sequences that are divided along time, one part per rank.

At each time step it says whether the sum of all inputs so far is positive, so it has to remember
what other ranks have read. ``mpiexec -n 3 python rnn.py full``; with ``truncated``, gradients do
not leave their rank.
"""

import argparse

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

import chainermn
from chainermn.functions import pseudo_connect, recv, send

N_SEQUENCES, LENGTH, N_UNITS = 64, 12, 16


class Full(chainer.Chain):
    """The network on the part of this rank. States go to the next rank, gradients come back."""

    def __init__(self, comm) -> None:
        super().__init__()
        before = comm.rank - 1 if comm.rank > 0 else None
        after = comm.rank + 1 if comm.rank < comm.size - 1 else None
        lstm = L.NStepLSTM(1, 1, N_UNITS, 0.0)
        with self.init_scope():
            self.rnn = chainermn.links.create_multi_node_n_step_rnn(lstm, comm, before, after)
            self.out = L.Linear(N_UNITS, 2)

    def forward(self, xs, ts):
        *_, ys, delegate = self.rnn(xs)
        loss = F.softmax_cross_entropy(self.out(F.concat(ys, axis=0)), np.concatenate(ts))
        (loss,) = pseudo_connect(delegate, loss)
        return loss


class Truncated(chainer.Chain):
    """The same; states go to the next rank as arrays, which have no gradients."""

    def __init__(self, comm) -> None:
        super().__init__()
        self.comm = comm
        with self.init_scope():
            self.rnn = L.NStepLSTM(1, 1, N_UNITS, 0.0)
            self.out = L.Linear(N_UNITS, 2)

    def forward(self, xs, ts):
        rank, size = self.comm.rank, self.comm.size
        states = recv(self.comm, rank - 1) if rank > 0 else (None, None)
        *states, ys = self.rnn(*states, xs)
        if rank < size - 1:
            send([state.array for state in states], self.comm, rank + 1)
        return F.softmax_cross_entropy(self.out(F.concat(ys, axis=0)), np.concatenate(ts))


def sequences(seed):
    """Return inputs and, for each step, whether the sum of the inputs so far is positive."""
    xs = np.random.RandomState(seed).randn(N_SEQUENCES, LENGTH, 1).astype(np.float32)
    return xs, (xs.cumsum(axis=1)[..., 0] > 0).astype(np.int32)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("gradients", choices=["full", "truncated"])
    gradients = parser.parse_args().gradients
    comm = chainermn.create_communicator()
    np.random.seed(0)
    model = Full(comm) if gradients == "full" else Truncated(comm)
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.Adam(0.05), comm)
    optimizer.setup(model)
    begin, end = chainermn.scatter_index(LENGTH, comm)
    for step in range(21):
        xs, ts = sequences(seed=step)
        loss = model(list(xs[:, begin:end]), list(ts[:, begin:end]))
        model.cleargrads()
        loss.backward()
        optimizer.update()
        if step % 10 == 0:
            mean = comm.allreduce(loss.array, "mean")
            if comm.rank == 0:
                print(f"step {step}: loss {mean:.2f}")


if __name__ == "__main__":
    main()
