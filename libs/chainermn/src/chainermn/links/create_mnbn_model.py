"""From batch normalization on each rank to batch normalization over all ranks."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import chainer
import chainer.links as L

from chainermn.functions.batch_normalization import Backend, get_communication_backend
from chainermn.links.batch_normalization import MultiNodeBatchNormalization

if TYPE_CHECKING:
    from chainermn.communicators.communicator_base import CommunicatorBase


def create_mnbn_model(
    link: chainer.Link,
    comm: CommunicatorBase,
    communication_backend: Backend = "auto",
) -> chainer.Link:
    """Copy a model, with `MultiNodeBatchNormalization` for every ``L.BatchNormalization``.

    Parameters
    ----------
    link : chainer.Link
        Chain, ChainList, Sequential, nested as may be, or one layer. It stays as it is.
    comm : CommunicatorBase
    communication_backend : {'auto', 'mpi', 'nccl'}
        See `MultiNodeBatchNormalization`.

    Returns
    -------
    chainer.Link
        A deep copy: parameters, persistent values and hyperparameters are carried over, and a
        layer that occurs twice still is one layer. Instances of subclasses of
        ``L.BatchNormalization`` stay what they are, as their computation is their own.

    Raises
    ------
    ValueError
        On every rank, if there is no such ``communication_backend``.
    """
    get_communication_backend(comm, communication_backend)
    # What deepcopy finds here it takes for copied, wherever in the model it comes across it.
    copies: dict[int, object] = {}
    for layer in link.links():
        if type(layer) is L.BatchNormalization:
            converted = MultiNodeBatchNormalization.__new__(MultiNodeBatchNormalization)
            converted.__dict__.update(copy.deepcopy(layer.__dict__, copies))
            converted.comm = comm
            converted._communication_backend = communication_backend
            copies[id(layer)] = converted
    return copy.deepcopy(link, copies)
