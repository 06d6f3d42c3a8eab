"""What a step changes: saved, restored and compared, to find out what a graph does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

# A graph may differ from an eager step by this much, if two eager steps differ: so many times the
# difference of those, plus this share of the step itself.
_TIMES, _PART = 10.0, 0.01


class State:
    """Copies of arrays that a step changes in place.

    Raises
    ------
    Exception
        CuPy's, if they do not fit into memory.
    """

    def __init__(self, arrays: Sequence[Any]) -> None:
        self._arrays = list(arrays)
        self._saved = self.now()

    def now(self) -> list[Any]:
        """Return copies of what the arrays contain now."""
        return [array.copy() for array in self._arrays]

    def restore(self) -> None:
        """Write back what was saved."""
        for array, saved in zip(self._arrays, self._saved, strict=True):
            array[...] = saved

    def different(self, others: Sequence[Any]) -> list[int]:
        """Return the indices of arrays whose bits differ from those of others."""
        pairs = zip(self._arrays, others, strict=True)
        # One wait for all.
        flags = [(_bits(array) != _bits(other)).any() for array, other in pairs]
        return [k for k, flag in enumerate(flags) if bool(flag)]

    def far(self, others: Sequence[Any], eager: Sequence[Any]) -> list[int]:
        """Return the indices of arrays that differ by more than eager steps differ.

        Parameters
        ----------
        others
            What the arrays were after a graph.
        eager
            What they were after an eager step; they are now as after another one.
        """
        found = []
        for k, (array, saved) in enumerate(zip(self._arrays, self._saved, strict=True)):
            if array.dtype.kind != "f":
                continue
            wide = array.astype(np.float64)
            of_graph = float(abs(others[k] - wide).max(initial=0))
            of_eager = float(abs(eager[k] - wide).max(initial=0))
            of_step = float(abs(saved - wide).max(initial=0))
            if not of_graph <= _TIMES * of_eager + _PART * of_step:
                found.append(k)
        return found


def _bits(array: Any) -> Any:
    return array.ravel().view(np.uint8)
