"""The random generators of the host that a step may draw from."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Iterable
from typing import Any

import chainer
import numpy as np

from chainer_fast.graphs.circumstances import closed_over

_KINDS = (np.random.Generator, np.random.RandomState, random.Random)


def generators_of(links: Iterable[chainer.Link], function: Any) -> list[Any]:
    """Return the global generators, and those that links and a loss function have."""
    values: list[Any] = [random.random.__self__, np.random.rand.__self__]  # type: ignore[attr-defined]
    for owner in (*links, function, getattr(function, "__self__", None)):
        values += getattr(owner, "__dict__", {}).values()
    values += closed_over(function)
    return list({id(each): each for each in values if isinstance(each, _KINDS)}.values())


def state_of(generator: Any) -> Any:
    """Return the state of a generator."""
    if isinstance(generator, np.random.Generator):
        return copy.deepcopy(generator.bit_generator.state)
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state(legacy=False)


def is_in(generator: Any, state: Any) -> bool:
    """Return whether a generator is in a state that `state_of` has returned."""
    return pickle.dumps(state_of(generator)) == pickle.dumps(state)


def set_state(generator: Any, state: Any) -> None:
    """Set the state of a generator to one that `state_of` has returned."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)
