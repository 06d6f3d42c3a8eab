"""The replicas of a model: make them equal on all ranks, and know whether they are."""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING, Any

import chainer
import numpy as np
from chainer.variable import VariableNode

from chainermn.agreement import attempt, raise_errors_of, run_together
from chainermn.gradients.parameters import initialized_parameters
from chainermn.gradients.persistents import bcast_persistents, named_persistents
from chainermn.optimizers.parts import digest_of, parameters_of, states_of
from chainermn.optimizers.settings import hyperparameters, set_hyperparameters

if TYPE_CHECKING:
    from chainermn.communicators.communicator_base import CommunicatorBase


class Replicas:
    """Remembers the model whose replicas were equal on all ranks at least once.

    This no longer holds for another model, nor after a parameter has been added, replaced or
    initialized.
    """

    def __init__(self) -> None:
        self._link: chainer.Link | None = None
        self._nodes: Set[VariableNode] = frozenset()

    def were_equal(self, target: chainer.Link) -> bool:
        """Tell whether the replicas of this model were equal once."""
        return self._link is not None and self._link is target

    def has_other_parameters(self, target: chainer.Link) -> bool:
        """Tell whether other parameters are initialized now than when replicas were equal."""
        if not self.were_equal(target):
            return True
        return self._nodes != initialized_parameters(target).keys()

    def note_equal(self, target: chainer.Link) -> None:
        """Remember that the replicas of this model are equal."""
        self._link = target
        self._nodes = frozenset(initialized_parameters(target))

    def forget(self) -> None:
        """Forget the model."""
        self._link, self._nodes = None, frozenset()


def follow_rank_0(
    communicator: CommunicatorBase,
    optimizer: chainer.Optimizer,
    persistents: bytes | None = None,
) -> None:
    """Give all ranks what the replica of rank 0 has, wherever they differ. Collective.

    Parameters
    ----------
    communicator : CommunicatorBase
        Communicator of the ranks.
    optimizer : chainer.Optimizer
        Optimizer, and through it its model.
    persistents : bytes, optional
        Digest of the persistent values to compare, by default those that the model has now.

    Raises
    ------
    Exception
        On every rank, if the models or the optimizers are too different.
    """
    model = optimizer.target

    def digests() -> tuple[bytes, ...]:
        initialize_states(model)
        return (
            digest_of(parameters_of(model)),
            digest_of(states_of(optimizer)),
            persistents or digest_of(dict(named_persistents(model))),
        )

    everywhere = communicator.allgather_obj(attempt(digests))
    raise_errors_of(dict(enumerate(everywhere)), "update")
    parameters, states, others = zip(*everywhere, strict=True)
    if len(set(parameters)) > 1:
        follow_parameters(communicator, model)
    if len(set(states)) > 1:
        saved: dict[str, Any] = {}
        if communicator.rank == 0:
            optimizer.serialize(chainer.serializers.DictionarySerializer(saved))
        loaded = chainer.serializers.NpzDeserializer(communicator.bcast_obj(saved))
        where = "taking over the state of rank 0's optimizer"
        run_together(communicator, where, lambda: optimizer.serialize(loaded))
    if len(set(others)) > 1:
        bcast_persistents(communicator, model, "update")


def follow_settings(communicator: CommunicatorBase, optimizer: chainer.Optimizer) -> None:
    """Give all ranks the hyperparameters and the loss scale of rank 0. Collective."""
    own = {key: one for key, one in vars(optimizer).items() if key.startswith("_loss_scal")}
    values, of_rank_0 = communicator.bcast_obj((hyperparameters(optimizer), own))
    set_hyperparameters(optimizer, values)
    for key in own.keys() - of_rank_0.keys():
        delattr(optimizer, key)
    vars(optimizer).update(of_rank_0)


def follow_parameters(communicator: CommunicatorBase, model: chainer.Link) -> None:
    """Give all ranks the parameters of rank 0, and their states if they lacked any. Collective."""
    communicator.bcast_data(model)
    initialize_states(model)


def initialize_states(model: chainer.Link) -> None:
    """Initialize the states of update rules; Chainer cannot load a snapshot without them."""
    for parameter in model.params():
        rule = getattr(parameter, "update_rule", None)
        if rule is None or parameter.array is None:
            continue
        if rule._use_fp32_update and parameter.dtype == np.float16:
            continue  # the state belongs to a copy in float32
        rule._init_states(parameter)
