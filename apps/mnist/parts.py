"""The perceptron in two parts: rank 0 has the outer layers, rank 1 the one between them."""

from collections.abc import Sized

import chainer
from chainer.training.extension import PRIORITY_EDITOR, Extension

import chainermn
from model import MLP

OUTER, MIDDLE = 0, 1  # the ranks; images go in and scores come out on rank 0


class Hidden(chainer.Chain):
    """A hidden layer and its ReLU.

    Parameters
    ----------
    layer : chainer.links.Linear
    """

    def __init__(self, layer: chainer.Link) -> None:
        super().__init__()
        with self.init_scope():
            self.layer = layer

    def forward(self, x: chainer.Variable) -> chainer.Variable:
        """Return the layer's output for ``x``, of shape (batch, units)."""
        return chainer.functions.relu(self.layer(x))


def part_of(mlp: MLP, comm: chainermn.CommunicatorBase) -> chainermn.MultiNodeChainList:
    """Return this rank's part of a perceptron.

    Parameters
    ----------
    mlp : MLP
        The whole perceptron, whose layers the parts share.
    comm : CommunicatorBase
        Communicator of two ranks.

    Returns
    -------
    chainermn.MultiNodeChainList
        On rank 0 it takes and returns what `MLP` does. On rank 1 it takes nothing and returns
        a delegate, to run backward from.
    """
    part = chainermn.MultiNodeChainList(comm)
    if comm.rank == OUTER:
        part.add_link(Hidden(mlp.l1), rank_in=None, rank_out=MIDDLE)
        part.add_link(mlp.l3, rank_in=MIDDLE, rank_out=None)
    else:
        part.add_link(Hidden(mlp.l2), rank_in=OUTER, rank_out=OUTER)
    return part


def input_of(dataset: Sized | None, comm: chainermn.CommunicatorBase) -> Sized:
    """Return the data set on rank 0, and as many empty examples on rank 1. Collective."""
    length = comm.bcast_obj(len(dataset) if comm.rank == OUTER else None, root=OUTER)
    return dataset if comm.rank == OUTER else chainermn.create_empty_dataset(range(length))


class Unite(Extension):
    """Copies the layer of rank 1 to rank 0 after each epoch, to save the whole network.

    Parameters
    ----------
    mlp : MLP
        Perceptron that was given to `part_of`.
    comm : CommunicatorBase
    """

    trigger = 1, "epoch"
    priority = PRIORITY_EDITOR  # before the extensions that save the network

    def __init__(self, mlp: MLP, comm: chainermn.CommunicatorBase) -> None:
        self.mlp, self.comm = mlp, comm

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        """Copy the layer. Collective."""
        for _, parameter in sorted(self.mlp.l2.namedparams()):
            parameter.array[...] = self.comm.bcast(parameter.array, root=MIDDLE)
