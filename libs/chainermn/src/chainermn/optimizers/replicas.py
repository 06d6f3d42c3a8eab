"""The replicas of a model: make them equal on all ranks, and know whether they are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Set
from typing import TYPE_CHECKING, Any

import chainer
import numpy as np
from chainer.variable import VariableNode

from chainermn.gradients.parameters import initialized_parameters, named_parameters

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


def make_equal(communicator: CommunicatorBase, target: chainer.Link) -> None:
    """Give all ranks the same parameters and initial states of update rules. Collective."""
    communicator.bcast_data(target)
    initialize_states(target)


def are_equal(communicator: CommunicatorBase, arrays: Iterable[tuple[str, Any]]) -> bool:
    """Tell whether all ranks have the same named arrays. Collective."""
    digests = communicator.allgather_obj(_digest(arrays))
    return all(digest == digests[0] for digest in digests)


def arrays_of(target: chainer.Link) -> list[tuple[str, Any]]:
    """Return the names and arrays of all parameters; None if a parameter has no array."""
    return [(name, parameter.array) for name, parameter in named_parameters(target)]


def initialize_states(link: chainer.Link) -> None:
    """Initialize the states of update rules; Chainer cannot load a snapshot without them."""
    for parameter in link.params():
        rule = getattr(parameter, "update_rule", None)
        if rule is None or parameter.array is None:
            continue
        if rule._use_fp32_update and parameter.dtype == np.float16:
            continue  # the state belongs to a copy in float32
        rule._init_states(parameter)


def _digest(arrays: Iterable[tuple[str, Any]]) -> bytes:
    digest = hashlib.blake2b()
    for name, array in arrays:
        digest.update(repr((name, None if array is None else (array.shape, array.dtype))).encode())
        if array is not None:
            digest.update(np.ascontiguousarray(chainer.backends.cuda.to_cpu(array)).tobytes())
    return digest.digest()
