"""Replace batch normalization on each rank by one over all ranks."""

from __future__ import annotations

import copy

import chainer
import chainer.links as L

from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.functions.batch_normalization import Backend, get_communication_backend
from chainermn.links.batch_normalization import MultiNodeBatchNormalization


def create_mnbn_model(
    link: chainer.Link,
    comm: CommunicatorBase,
    communication_backend: Backend = "auto",
) -> chainer.Link:
    """Copy a model, replacing ``L.BatchNormalization`` by `MultiNodeBatchNormalization`.

    Parameters
    ----------
    link : chainer.Link
        A layer, or any nesting of Chain, ChainList and Sequential. It stays as it is.
    comm : CommunicatorBase
    communication_backend : {'auto', 'mpi', 'nccl'}
        See `MultiNodeBatchNormalization`.

    Returns
    -------
    chainer.Link
        A deep copy that keeps parameters, persistent values and hyperparameters. A layer that
        occurs twice is still one layer. Instances of subclasses of ``L.BatchNormalization`` are
        not replaced, since they may compute something else.

    Raises
    ------
    ValueError
        If ``communication_backend`` is unknown, or ``comm`` does not have it.
    """
    get_communication_backend(comm, communication_backend)
    # deepcopy takes the layers in this memo for copied, wherever in the model they occur.
    copies: dict[int, object] = {}
    for layer in link.links():
        if type(layer) is L.BatchNormalization:
            converted = MultiNodeBatchNormalization.__new__(MultiNodeBatchNormalization)
            converted.__dict__.update(copy.deepcopy(layer.__dict__, copies))
            converted.comm = comm
            converted._communication_backend = communication_backend
            copies[id(layer)] = converted
    return copy.deepcopy(link, copies)
