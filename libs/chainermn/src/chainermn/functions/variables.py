"""Create variables that carry no values: zero gradients and delegate variables."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any, TypeAlias

import chainer
import numpy as np
from chainer import backend

#: Module, shape and dtype of an array.
Layout: TypeAlias = tuple[ModuleType, tuple[int, ...], np.dtype[Any]]


def as_variable(x: Any) -> chainer.Variable:
    """Return ``x`` as a variable; raise TypeError unless it is an array or a variable with one."""
    if not isinstance(x, (chainer.Variable, *chainer.get_array_types())):
        raise TypeError(f"expected a variable or an array, got {type(x)}")
    variable = chainer.as_variable(x)
    if variable.array is None:
        raise TypeError("expected a variable with an array, got one that is not initialized")
    return variable


def layouts(arrays: Iterable[Any]) -> list[Layout]:
    """Return the layouts of arrays."""
    return [(backend.get_array_module(array), array.shape, array.dtype) for array in arrays]


def zeros(layout: Layout) -> chainer.Variable:
    """Return a variable of zeros."""
    xp, shape, dtype = layout
    return chainer.Variable(xp.zeros(shape, dtype))


def or_zeros(
    variables: Iterable[chainer.Variable | None], like: Iterable[Layout]
) -> tuple[chainer.Variable, ...]:
    """Replace every None, which stands for a missing gradient, by zeros."""
    pairs = zip(variables, like, strict=True)
    return tuple(zeros(layout) if var is None else var for var, layout in pairs)


def empty_delegate(xp: ModuleType = np) -> Any:
    """Return the array of a delegate variable, which is part of the graph but has no values."""
    return xp.zeros(0, np.float32)
