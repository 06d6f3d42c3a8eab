"""Replace batch normalization on each rank by one over all ranks."""

from __future__ import annotations

import copy

import chainer
import chainer.links as L

from chainermn.arguments import check_communicator, check_has
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.functions.batch_normalization import Backend, get_communication_backend
from chainermn.links.batch_normalization import MultiNodeBatchNormalization


def create_mnbn_model(
    link: chainer.Link,
    comm: CommunicatorBase,
    communication_backend: Backend = "auto",
) -> chainer.Link:
    """Copy a model, and replace its batch normalization by `MultiNodeBatchNormalization`.

    Parameters
    ----------
    link : chainer.Link
        Model to copy: a layer, or any nesting of Chain, ChainList and Sequential. It does not
        change.
    comm : CommunicatorBase
        Communicator of the ranks.
    communication_backend : {'auto', 'mpi', 'nccl'}
        Backend of the new layers, see `MultiNodeBatchNormalization`.

    Returns
    -------
    chainer.Link
        Deep copy with the same parameters, persistent values and hyperparameters. A layer that
        occurs twice in the model is still one layer. Instances of subclasses of
        ``chainer.links.BatchNormalization`` are not replaced, because they may compute something
        else.

    Raises
    ------
    TypeError
        If ``link`` is not a link, or ``comm`` is not a communicator.
    ValueError
        If ``communication_backend`` is unknown, or ``comm`` does not have it.

    Examples
    --------
    >>> model = chainer.Sequential(L.Linear(2, 3), L.BatchNormalization(3))
    >>> model = chainermn.links.create_mnbn_model(model, comm)
    >>> [type(layer).__name__ for layer in model]
    ['Linear', 'MultiNodeBatchNormalization']
    """
    check_communicator("create_mnbn_model(link, comm)", comm, link)
    check_has("create_mnbn_model", link, "a model, which is a chainer.Link", "links")
    get_communication_backend(comm, communication_backend)
    # deepcopy does not copy the layers in this memo, wherever they occur in the model.
    copies: dict[int, object] = {}
    for layer in link.links():
        if type(layer) is L.BatchNormalization:
            converted = MultiNodeBatchNormalization.__new__(MultiNodeBatchNormalization)
            converted.__dict__.update(copy.deepcopy(layer.__dict__, copies))
            converted.comm = comm
            converted._communication_backend = communication_backend
            copies[id(layer)] = converted
    return copy.deepcopy(link, copies)
