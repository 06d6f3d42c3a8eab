"""The arguments of a step: arrays that change, and everything else, which must stay the same."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from chainer_fast.graphs.state import differ

_PLAIN = (int, float, bool, str, bytes, type(None))


class NotRecordable(Exception):
    """A step cannot be recorded; the message says why."""


def signature(value: Any, array: Any) -> Hashable:
    """Return what must be the same for one graph to do the step for two values.

    Parameters
    ----------
    value
        Argument of a loss function.
    array
        Class of arrays in GPU memory.

    Raises
    ------
    NotRecordable
        For arrays in host memory and other objects, which a graph could not follow.
    """
    if isinstance(value, array):
        return "array", value.shape, value.dtype.str
    if type(value) in (tuple, list):
        return type(value).__name__, *[signature(each, array) for each in value]
    if type(value) is dict:
        return "dict", *[(key, signature(each, array)) for key, each in value.items()]
    if isinstance(value, _PLAIN):
        return type(value).__name__, value
    if _is_input(value, array):
        return "variable", value.requires_grad, signature(value.array, array)
    if hasattr(value, "creator_node") and value.creator_node is not None:
        raise NotRecordable("an argument of the loss function is a variable that was computed")
    raise NotRecordable(
        f"an argument of the loss function is a {type(value).__module__}.{type(value).__name__}, "
        "not an array in GPU memory"
    )


def _is_input(value: Any, array: Any) -> bool:
    """Return whether a value is a variable that no function has computed."""
    creator = getattr(value, "creator_node", value)
    return creator is None and isinstance(getattr(value, "array", None), array)


class Inputs:
    """Arrays with the addresses that a graph reads, in the places of the arguments."""

    def __init__(self, xp: Any, variable: Any, given: Any) -> None:
        self._xp, self._variable = xp, variable
        self._arrays: list[Any] = []
        #: The arguments of the recorded step.
        self.recorded = self._copy(given)

    def _copy(self, value: Any) -> Any:
        if isinstance(value, self._xp.ndarray):
            self._arrays.append(self._xp.empty_like(value))
            return self._arrays[-1]
        if isinstance(value, (tuple, list)):
            return type(value)([self._copy(each) for each in value])
        if isinstance(value, dict):
            return {key: self._copy(each) for key, each in value.items()}
        if isinstance(value, self._variable):
            return self._variable(self._copy(value.array), requires_grad=value.requires_grad)
        return value

    def are(self, given: Any) -> bool:
        """Return whether a graph would read exactly these. Waits for the GPU."""
        pairs = zip(self._arrays, self._found(given), strict=True)
        return not any(bool(differ(mine, array)) for mine, array in pairs if mine.size)

    def write(self, given: Any) -> None:
        """Copy the arrays of a step to where the graph reads them."""
        for mine, array in zip(self._arrays, self._found(given), strict=True):
            if mine is not array:
                mine[...] = array

    def _found(self, value: Any) -> Sequence[Any]:
        if isinstance(value, self._xp.ndarray):
            return [value]
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, (tuple, list)):
            return [array for each in value for array in self._found(each)]
        return [value.array] if isinstance(value, self._variable) else []
