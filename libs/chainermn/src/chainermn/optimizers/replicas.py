"""The replicas of a model: whether they are the same on all ranks, and making them so."""

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
    """The replicas of the model that an optimizer has for its target.

    Once they are the same, equal steps keep them so, until the optimizer gets another target or
    a parameter is added, replaced or initialised.
    """

    def __init__(
        self, communicator: CommunicatorBase, actual_optimizer: chainer.Optimizer
    ) -> None:
        self._communicator = communicator
        self._optimizer = actual_optimizer
        self.forget()

    @property
    def are_of_target(self) -> bool:
        """Whether replicas of the present target have been the same once."""
        return self._link is not None and self._link is self._optimizer.target

    @property
    def have_changed(self) -> bool:
        """Whether there are other parameters here than when the replicas were the same."""
        if not self.are_of_target:
            return True
        return self._nodes != initialised_parameters(self._optimizer.target).keys()

    def forget(self) -> None:
        """Forget that replicas have been the same."""
        self._link: chainer.Link | None = None
        self._nodes: Set[VariableNode] = frozenset()

    def note(self) -> None:
        """Remember that the replicas are the same."""
        self._link = self._optimizer.target
        self._nodes = frozenset(initialised_parameters(self._link))

    def make_equal(self) -> None:
        """Give all ranks the parameters of rank 0. Collective."""
        self._communicator.bcast_data(self._optimizer.target)
        initialise_states(self._optimizer.target)
        self.note()

    def are_equal(self, arrays: Iterable[tuple[str, Any]] | None = None) -> bool:
        """Tell whether named arrays, those of the parameters by default, are. Collective."""
        if arrays is None:
            arrays = ((name, p.array) for name, p in named_parameters(self._optimizer.target))
        digests = self._communicator.allgather_obj(_digest(arrays))
        return all(digest == digests[0] for digest in digests)


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
