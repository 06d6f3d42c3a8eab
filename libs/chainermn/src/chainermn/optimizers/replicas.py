"""The replicas of a model: make them equal on all ranks, and know whether they are."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, Any

import chainer
from chainer.variable import VariableNode

from chainermn.gradients.parameters import initialized_parameters
from chainermn.optimizers.parts import (
    describe,
    initialize_states,
    parameters_of,
    persistents_of,
    states_of,
    values_of,
)
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


def follow_rank_0(communicator: CommunicatorBase, optimizer: chainer.Optimizer) -> None:
    """Give all ranks the parts of the replica of rank 0, wherever they differ. Collective.

    Raises
    ------
    TypeError, ValueError
        On every rank, if the models or the optimizers do not have parts of the same names.
    """
    model = optimizer.target
    initialize_states(model)
    others = [*states_of(optimizer), *persistents_of(model)]
    if are_equal(communicator, values_of([*parameters_of(model), *others])):
        return
    bcast_parameters(communicator, model)
    others = [*states_of(optimizer), *persistents_of(model)]
    own = describe(values_of(others))
    of_rank_0 = communicator.bcast_obj(own)
    unlike = sorted(own.keys() ^ of_rank_0.keys())
    differing = {name for name in of_rank_0 if own.get(name) != of_rank_0[name]}
    everywhere = communicator.allgather_obj((unlike, differing))
    for rank, (names, _) in enumerate(everywhere):
        if names:
            raise ValueError(
                "the models and optimizers of all ranks must have the same parts; rank 0 and rank "
                f"{rank} do not both have {', '.join(names[:3])}"
            )
    wanted = {name for _, names in everywhere for name in names}
    values = communicator.bcast_obj(
        {part.name: part.value for part in others if part.name in wanted}
    )
    for part in others:
        if values.get(part.name) is not None:  # None: only known after the first forward pass
            part.assign(values[part.name])


def follow_settings(communicator: CommunicatorBase, optimizer: chainer.Optimizer) -> None:
    """Give all ranks the hyperparameters and the loss scale of rank 0. Collective."""
    own = hyperparameters(optimizer), optimizer._loss_scale
    values, optimizer._loss_scale = communicator.bcast_obj(own)
    set_hyperparameters(optimizer, values)


def bcast_parameters(communicator: CommunicatorBase, model: chainer.Link) -> None:
    """Give all ranks the same parameters, and states for those that they lacked. Collective."""
    communicator.bcast_data(model)
    initialize_states(model)


def are_equal(communicator: CommunicatorBase, values: Mapping[str, Any]) -> bool:
    """Tell whether all ranks have the same values under the same names. One small collective."""
    return len(set(communicator.allgather_obj(digest_of(values)))) == 1


def digest_of(values: Mapping[str, Any]) -> bytes:
    """Return a few bytes that are equal on ranks with equal values under the same names."""
    return hashlib.blake2b(repr(describe(values)).encode(), digest_size=16).digest()
