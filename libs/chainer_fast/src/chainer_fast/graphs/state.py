"""What a step changes: saved, restored and compared, to find out what a graph does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# An eager step may differ from a graph by this much, if two launches of the graph differ: so many
# times the difference of those, plus this share of the step itself.
_TIMES, _SHARE = 10.0, 0.01
# If they do not: by these units in the last place, plus this share of the step. Kernels of a
# graph read numbers from memory, so a compiler may round differently.
_UNITS, _ROUNDED_SHARE = 2.0, 1e-5


class State:
    """Copies of arrays that a step changes in place.

    Parameters
    ----------
    arrays : dict of str to array
        The arrays by name.
    n_copies : int
        Number of further copies to make room for.

    Raises
    ------
    Exception
        CuPy's, if the copies do not fit into memory.
    """

    def __init__(self, arrays: Mapping[str, Any], n_copies: int = 0) -> None:
        self._arrays = dict(arrays)
        self._saved = [array.copy() for array in self._arrays.values()]
        self._room = [[array.copy() for array in self._saved] for _ in range(n_copies)]

    def now(self) -> list[Any]:
        """Return copies of what the arrays contain now."""
        if not self._room:
            return [array.copy() for array in self._arrays.values()]
        copies = self._room.pop()
        for copy, array in zip(copies, self._arrays.values(), strict=True):
            copy[...] = array
        return copies

    def restore(self, copies: Sequence[Any] | None = None) -> None:
        """Write back what was saved, or copies that `now` has returned."""
        for array, saved in zip(self._arrays.values(), copies or self._saved, strict=True):
            array[...] = saved

    def different(self, others: Sequence[Any]) -> list[str]:
        """Return the names of arrays whose bits differ from those of others."""
        pairs = zip(self._arrays.values(), others, strict=True)
        flags = [differ(array, other) for array, other in pairs]
        return [name for name, flag in zip(self._arrays, flags, strict=True) if bool(flag)]

    def far(self, of_graph: Sequence[Any], of_eager: Sequence[Any]) -> list[str]:
        """Return the names of arrays in which an eager step differs too much from a graph.

        Parameters
        ----------
        of_graph
            What the arrays were after a launch of the graph. They are now as after another one.
        of_eager
            What they were after an eager step.
        """
        found = []
        for k, (name, array) in enumerate(self._arrays.items()):
            if array.size == 0 or not differ(of_graph[k], of_eager[k]):
                continue
            wide = of_graph[k].astype(np.float64)
            of_launches = float(abs(array - wide).max())
            of_step = float(abs(self._saved[k] - wide).max())
            limit = _TIMES * of_launches + _SHARE * of_step
            if of_launches == 0:
                unit = np.finfo(array.dtype).eps if array.dtype.kind == "f" else 0
                limit = _UNITS * unit * abs(wide) + _ROUNDED_SHARE * of_step
            if not (abs(of_eager[k] - wide) <= limit).all():
                found.append(name)
        return found


def differ(one: Any, other: Any) -> Any:
    """Return whether any bits of two arrays differ, as an array without axes."""
    bits, others = (array.ravel().view(np.uint8) for array in (one, other))
    return (bits != others).any()
