"""The replicas of a model: making them equal on all ranks, and what is known of that."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Set
from typing import TYPE_CHECKING, Any

import chainer
import numpy as np
from chainer.variable import VariableNode

from chainermn.gradients.parameters import initialised_parameters, named_parameters

if TYPE_CHECKING:
    from chainermn.communicators.communicator_base import CommunicatorBase


class Replicas:
    """What this rank knows of the replicas: of which model they were equal, at least once.

    They are no longer if there is another model, or if a parameter has been added, replaced or
    initialised.
    """

    def __init__(self) -> None:
        self._link: chainer.Link | None = None
        self._nodes: Set[VariableNode] = frozenset()

    def were_equal(self, target: chainer.Link) -> bool:
        """Tell whether the replicas of this model were equal once."""
        return self._link is not None and self._link is target

    def has_other_parameters(self, target: chainer.Link) -> bool:
        """Tell whether this model has other initialised parameters than when they were equal."""
        if not self.were_equal(target):
            return True
        return self._nodes != initialised_parameters(target).keys()

    def note_equal(self, target: chainer.Link) -> None:
        """Remember that the replicas of this model are equal."""
        self._link = target
        self._nodes = frozenset(initialised_parameters(target))

    def forget(self) -> None:
        """Forget of which model they were equal."""
        self._link, self._nodes = None, frozenset()


def make_equal(communicator: CommunicatorBase, target: chainer.Link) -> None:
    """Give all ranks the same parameters, by `bcast_data`, and states of update rules.

    Collective.
    """
    communicator.bcast_data(target)
    initialise_states(target)


def are_equal(communicator: CommunicatorBase, arrays: Iterable[tuple[str, Any]]) -> bool:
    """Tell whether all ranks have the same arrays, given with their names. Collective."""
    digests = communicator.allgather_obj(_digest(arrays))
    return all(digest == digests[0] for digest in digests)


def arrays_of(target: chainer.Link) -> list[tuple[str, Any]]:
    """Return the arrays of all parameters with their names; None for one without an array."""
    return [(name, parameter.array) for name, parameter in named_parameters(target)]


def initialise_states(link: chainer.Link) -> None:
    """Initialise the states of update rules, without which Chainer cannot load a snapshot."""
    for parameter in link.params():
        rule = getattr(parameter, "update_rule", None)
        if rule is None or parameter.array is None:
            continue
        if rule._use_fp32_update and parameter.dtype == np.float16:
            continue  # the state is that of a copy in float32
        rule._init_states(parameter)


def _digest(arrays: Iterable[tuple[str, Any]]) -> bytes:
    digest = hashlib.blake2b()
    for name, array in arrays:
        digest.update(repr((name, None if array is None else (array.shape, array.dtype))).encode())
        if array is not None:
            digest.update(np.ascontiguousarray(chainer.backends.cuda.to_cpu(array)).tobytes())
    return digest.digest()
