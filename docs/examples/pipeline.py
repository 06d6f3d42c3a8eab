"""A small GPipe: a network on several ranks in a row, and each batch in micro-batches.

mpiexec -n 2 python pipeline.py [--micro-batches 4] [--batchsize 24] [--channels 8] [--recompute]
    [--out FOLDER]

With --out, each rank saves its parameters there, from before and after training.
"""

from __future__ import annotations

import argparse

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

import chainermn
from chainermn.agreement import exit_together

LAYERS, COLORS, SIZE = 12, 3, 32


def make_model(comm: chainermn.CommunicatorBase, stage: chainer.Link) -> chainer.Link:
    """Put the stages of all ranks in a row."""
    last = comm.size - 1
    model = chainermn.MultiNodeChainList(comm)
    model.add_link(
        stage,
        rank_in=comm.rank - 1 if comm.rank > 0 else None,
        rank_out=comm.rank + 1 if comm.rank < last else None,
    )
    return model


def backprop(model: chainer.Link, x: np.ndarray, t: np.ndarray, micro_batches: int) -> float:
    """Set the gradients of the mean loss of a batch; return the loss, or 0 before the last rank.

    The first rank uses ``x``, the last one ``t``.
    """
    is_last = model.comm.rank == model.comm.size - 1
    model.cleargrads()
    ends = []
    for i in range(micro_batches):
        part = slice(len(x) * i // micro_batches, len(x) * (i + 1) // micro_batches)
        y = model(x[part])  # before the last rank, a delegate, which has no values
        if is_last:
            y = F.softmax_cross_entropy(y, t[part]) * (len(t[part]) / len(t))
        ends.append(y)
    for y in reversed(ends):
        y.backward()  # adds to the gradients
    return sum(y.array.sum().item() for y in ends)


class Recomputed(chainer.Sequential):
    """Layers that keep only their input, and compute the rest again in backward."""

    def forward(self, x: chainer.Variable | np.ndarray) -> chainer.Variable:
        x = x if isinstance(x, chainer.Variable) else chainer.Variable(x)
        return F.forget(super().forward, x)


class Layer(chainer.Chain):
    """A convolution whose output is added to its input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        initial = chainer.initializers.HeNormal(scale=0.1)
        with self.init_scope():
            self.convolution = L.Convolution2D(channels, channels, 3, pad=1, initialW=initial)

    def forward(self, h: chainer.Variable) -> chainer.Variable:
        return h + F.relu(self.convolution(h))


def make_stage(
    rank: int, ranks: int, channels: int, kind: type[chainer.Sequential] = chainer.Sequential
) -> chainer.Sequential:
    """Return the layers of a rank."""
    length = LAYERS * (rank + 1) // ranks - LAYERS * rank // ranks
    layers: list = [Layer(channels) for _ in range(length)]
    if rank == 0:
        layers.insert(0, L.Convolution2D(COLORS, channels, 1))
    if rank == ranks - 1:
        layers += [lambda h: F.average(h, axis=(2, 3)), L.Linear(channels, COLORS)]
    return kind(*layers)


def make_batch(length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return noisy images, and the color of each."""
    t = np.arange(length, dtype=np.int32) % COLORS
    x = np.random.RandomState(0).normal(0, 1, (length, COLORS, SIZE, SIZE))
    x[np.arange(length), t] += 2
    return x.astype(chainer.get_dtype()), t


def check_micro_batches(micro_batches: int, batchsize: int) -> None:
    if not 1 <= micro_batches <= batchsize:
        raise ValueError(
            f"--micro-batches {micro_batches}: expected a number from 1 to the batch size, "
            f"{batchsize}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--batchsize", type=int, default=24)
    parser.add_argument("--channels", type=int, default=8)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--out", help="an existing folder")
    args = parser.parse_args()
    comm = chainermn.create_communicator()
    with exit_together(comm):
        check_micro_batches(args.micro_batches, args.batchsize)
    np.random.seed(comm.rank)
    kind = Recomputed if args.recompute else chainer.Sequential
    model = make_model(comm, make_stage(comm.rank, comm.size, args.channels, kind))
    if args.out:
        chainer.serializers.save_npz(f"{args.out}/before{comm.rank}.npz", model)
    optimizer = chainer.optimizers.MomentumSGD(lr=0.02).setup(model)  # of this rank's parameters
    x, t = make_batch(args.batchsize)  # the same on every rank
    for step in range(5):
        loss = comm.allreduce_obj(backprop(model, x, t, args.micro_batches))
        optimizer.update()
        if comm.rank == 0:
            print(f"loss {loss:.3f} in step {step}")
    if args.out:
        chainer.serializers.save_npz(f"{args.out}/after{comm.rank}.npz", model)


if __name__ == "__main__":
    main()
