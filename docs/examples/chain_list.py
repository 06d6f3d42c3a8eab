"""Train models whose links are on several ranks: in a row on two ranks, branching on three."""

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

import chainermn


class Join(chainer.Chain):
    """A layer on what two branches return."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.layer = L.Linear(6, 2)

    def forward(self, one, other):
        return self.layer(F.concat((one, other)))


def layer(n_in, n_out) -> chainer.Sequential:
    return chainer.Sequential(L.Linear(n_in, n_out), F.tanh)


def in_a_row(comm, encoder, middle, decoder) -> chainermn.MultiNodeChainList:
    model = chainermn.MultiNodeChainList(comm)
    if comm.rank == 0:
        model.add_link(encoder, rank_in=None, rank_out=1)
        model.add_link(decoder, rank_in=1, rank_out=None)
    else:
        model.add_link(middle, rank_in=0, rank_out=0)
    return model


def with_branches(comm, first, branches, join) -> chainermn.MultiNodeChainList:
    model = chainermn.MultiNodeChainList(comm)
    if comm.rank == 0:
        model.add_link(first, rank_in=None, rank_out=[1, 2])
        model.add_link(join, rank_in=[1, 2], rank_out=None)
    else:
        model.add_link(branches[comm.rank - 1], rank_in=0, rank_out=0)
    return model


def train(comm, model, x, t, steps=5) -> list[float]:
    """Train the links of this rank; return the losses on rank 0."""
    losses = []
    optimizer = chainer.optimizers.SGD(lr=0.5).setup(model)
    for _ in range(steps):
        model.cleargrads()
        if comm.rank == 0:
            loss = F.softmax_cross_entropy(model(x), t)
            loss.backward()
            losses.append(loss.item())
        else:
            delegate = model()
            delegate.backward()
        optimizer.update()
    return losses


def main() -> None:
    comm = chainermn.create_communicator()
    if comm.size not in (2, 3):
        raise ValueError(f"expected 2 or 3 ranks, got {comm.size}")
    np.random.seed(0)
    if comm.size == 2:
        model = in_a_row(comm, layer(4, 3), layer(3, 3), L.Linear(3, 2))
    else:
        model = with_branches(comm, layer(4, 4), [layer(4, 3), layer(4, 3)], Join())
    x = np.random.RandomState(1).randn(6, 4).astype(np.float32)
    t = np.array([0, 1, 0, 0, 1, 1], np.int32)
    losses = train(comm, model, x, t)
    if comm.rank == 0:
        print("loss:", *(f"{loss:.3f}" for loss in losses))


if __name__ == "__main__":
    main()
