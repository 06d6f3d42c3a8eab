"""Convolutions of one image whose rows are divided among the ranks.

mpiexec -n 2 python spatially_parallel.py [--height 151] [--width 64] [--out FOLDER]

With --out, each rank saves its rows of the last output, and rank 0 the parameters.
"""

from __future__ import annotations

import argparse

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

import chainermn
from chainermn.agreement import exit_together


def with_halo(comm: chainermn.CommunicatorBase, x: np.ndarray, rows: int) -> chainer.Variable:
    """Return ``x`` with some rows of the ranks above and below, or zeros beyond the image."""
    above, below = comm.rank - 1, comm.rank + 1
    parts = [x[:, :, :0]] * comm.size  # nothing goes to the other ranks
    if above >= 0:
        parts[above] = x[:, :, :rows]
    if below < comm.size:
        parts[below] = x[:, :, -rows:]
    received = chainermn.functions.alltoall(comm, parts)
    zeros = np.zeros((*x.shape[:2], rows, x.shape[3]), x.dtype)
    top = received[above] if above >= 0 else zeros
    bottom = received[below] if below < comm.size else zeros
    return F.concat([top, x, bottom], axis=2)


class Net(chainer.Chain):
    """Each rank has all parameters, and computes its own rows of every output."""

    def __init__(self, comm: chainermn.CommunicatorBase) -> None:
        super().__init__()
        self.comm = comm
        with self.init_scope():
            self.first = L.Convolution2D(1, 8, 5, pad=(0, 2))  # pads columns, not rows
            self.second = L.Convolution2D(8, 8, 3, pad=(0, 1))
            self.last = L.Convolution2D(8, 1, 3, pad=(0, 1))

    def forward(self, x: np.ndarray) -> chainer.Variable:
        h = F.relu(self.first(with_halo(self.comm, x, rows=2)))
        h = F.relu(self.second(with_halo(self.comm, h, rows=1)))
        return self.last(with_halo(self.comm, h, rows=1))


def rows_of(comm: chainermn.CommunicatorBase, height: int) -> range:
    """Return the rows of this rank."""
    if height // comm.size < 2:
        raise ValueError(
            f"{height} rows on {comm.size} ranks: the first layer takes 2 rows of each neighbor, "
            "so every rank needs at least 2; use a higher image or fewer ranks"
        )
    return range(height * comm.rank // comm.size, height * (comm.rank + 1) // comm.size)


def read_rows(rows: range, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return these rows of a noisy image and of the one without noise, each alone a batch."""
    clean = np.sin(np.array(rows)[:, None] / 5) * np.cos(np.arange(width) / 7)
    noise = np.stack([np.random.RandomState(row).normal(0, 0.3, width) for row in rows])
    noisy, clean = (a.astype(chainer.get_dtype())[None, None] for a in (clean + noise, clean))
    return noisy, clean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--height", type=int, default=151)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--out", help="an existing folder")
    args = parser.parse_args()
    comm = chainermn.create_communicator()
    with exit_together(comm):
        rows = rows_of(comm, args.height)
    x, t = read_rows(rows, args.width)
    np.random.seed(0)
    net = Net(comm)
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(lr=0.1), comm)
    optimizer.setup(net)
    share = args.height * args.width / comm.size  # of the pixels, if they were divided evenly

    def loss() -> chainer.Variable:
        """Return the part of this rank. The mean over the ranks is that over the image."""
        return F.sum((net(x) - t) ** 2) / share

    for step in range(6):  # the first one makes the parameters equal
        optimizer.update(loss)
        mean = comm.allreduce(loss().array, "mean")
        if comm.rank == 0 and step in (0, 5):
            print(f"loss {mean:.3f} after {step} steps")
        if comm.rank == 0 and step == 0 and args.out:
            chainer.serializers.save_npz(f"{args.out}/before.npz", net)
    print(f"rank {comm.rank}: rows {rows.start} to {rows.stop}")
    if args.out:
        np.save(f"{args.out}/output{comm.rank}.npy", net(x).array)
        if comm.rank == 0:
            chainer.serializers.save_npz(f"{args.out}/after.npz", net)


if __name__ == "__main__":
    main()
