"""Random numbers that hooks and update rules draw: the same on all ranks."""

from __future__ import annotations

import contextlib
import pickle
import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import chainer
import numpy as np

if TYPE_CHECKING:
    from chainermn.communicators.communicator_base import CommunicatorBase

# Functions that get and set the state of each global generator.
_PYTHON, _NUMPY, _CUPY = "Python", "NumPy", "CuPy"
_GET: Mapping[str, Callable[[], Any]] = {
    _PYTHON: random.getstate,
    _NUMPY: np.random.get_state,
    _CUPY: lambda: chainer.backends.cuda.cupy.random.get_random_state(),
}
_SET: Mapping[str, Callable[[Any], None]] = {
    _PYTHON: random.setstate,
    _NUMPY: np.random.set_state,
    _CUPY: lambda state: chainer.backends.cuda.cupy.random.set_random_state(state),
}


class SharedDraws:
    """States of the global generators that are the same on all ranks, for use in a step."""

    def __init__(self) -> None:
        self._states: dict[str, Any] = {}

    def agree(self, communicator: CommunicatorBase, device: Any, *, share_all: bool) -> None:
        """Continue from the states of rank 0 that differ on any rank, or from all. Collective.

        A generator with the same state everywhere is used as it is: ranks draw what they always
        drew. The state of CuPy's cannot be read, so it is always replaced.
        """
        own = {name: _GET[name]() for name in (_PYTHON, _NUMPY)}
        checksums = communicator.allgather_obj({n: _checksum(one) for n, one in own.items()})
        differing = [
            n for n in own if share_all or any(one[n] != checksums[0][n] for one in checksums)
        ]
        self._states = {}
        if differing:
            self._states = communicator.bcast_obj({name: own[name] for name in differing})
        if device.xp is chainer.backends.cuda.cupy:
            self._states[_CUPY] = device.xp.random.RandomState(checksums[0][_NUMPY])

    def checksum(self) -> int:
        """Return a number below 2**32, the same on all ranks if they will draw the same."""
        own = [_GET[name]() for name in (_PYTHON, _NUMPY) if name not in self._states]
        return _checksum(own) if own else 0

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Let the global generators draw the same on all ranks in the ``with`` block."""
        before = _swap(self._states)
        try:
            yield
        finally:
            self._states = _swap(before)


def _swap(states: Mapping[str, Any]) -> dict[str, Any]:
    """Set the states of global generators, and return those before."""
    before = {name: _GET[name]() for name in states}
    for name, state in states.items():
        _SET[name](state)
    return before


def _checksum(state: Any) -> int:
    return zlib.crc32(pickle.dumps(state))
