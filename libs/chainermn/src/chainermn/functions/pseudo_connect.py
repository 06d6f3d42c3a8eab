"""Make variables depend on each other without sharing values."""

from __future__ import annotations

from typing import Any

import chainer

from chainermn.functions.variables import (
    Layout,
    as_variable,
    empty_delegate,
    layouts,
    or_zeros,
    zeros,
)


class PseudoConnect(chainer.FunctionNode):
    """``(delegate, *xs) -> xs``. Its gradients are those of `WithDelegate`."""

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return all inputs except the delegate."""
        (self._delegate,) = layouts(inputs[:1])
        return inputs[1:]

    def backward(
        self, indexes: tuple[int, ...], gys: tuple[chainer.Variable | None, ...]
    ) -> tuple[chainer.Variable | None, ...]:
        """Return zeros for the delegate, whose backward would not run without a gradient."""
        present = tuple(gy for gy in gys if gy is not None)
        if not present:
            return (zeros(self._delegate), *gys)
        delegate, *passed = WithDelegate(self._delegate).apply(present)
        rest = iter(passed)
        return (delegate, *(None if gy is None else next(rest) for gy in gys))


class WithDelegate(chainer.FunctionNode):
    """``xs -> (delegate, *xs)``. Its gradients are those of `PseudoConnect`."""

    def __init__(self, delegate: Layout | None = None) -> None:
        super().__init__()
        self._delegate = delegate  # empty by default

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return a delegate, followed by the inputs."""
        self._inputs = layouts(inputs)
        if self._delegate is None:
            return (empty_delegate(self._inputs[0][0]), *inputs)
        xp, shape, dtype = self._delegate
        return (xp.zeros(shape, dtype), *inputs)

    def backward(
        self, indexes: tuple[int, ...], gys: tuple[chainer.Variable | None, ...]
    ) -> tuple[chainer.Variable, ...]:
        """Return zeros for inputs of which only the delegate was used."""
        delegate, *rest = gys
        gxs = or_zeros(rest, self._inputs)
        return gxs if delegate is None else PseudoConnect().apply((delegate, *gxs))


def pseudo_connect(
    delegate_variable: chainer.Variable | None, *actual_variables: chainer.Variable
) -> tuple[chainer.Variable, ...]:
    """Make variables depend on another one, without changing their values.

    Backward then reaches ``delegate_variable`` from any of the results, after all functions
    that use them. It gets a gradient of zeros.

    Use it to start the backward of several graphs from one variable, and to fix the order in
    which a rank communicates: the call that comes first in forward must come last in backward.

    Parameters
    ----------
    delegate_variable : chainer.Variable or None
        Delegate that :func:`send` returns, or any other variable. None connects nothing.
    *actual_variables : chainer.Variable or ndarray

    Returns
    -------
    tuple of chainer.Variable
        One for each of ``actual_variables``, with the same arrays; always a tuple.

    Raises
    ------
    TypeError
        If an argument is neither a variable nor an array.
    """
    actual = tuple(as_variable(variable) for variable in actual_variables)
    if delegate_variable is None or not actual:
        return actual
    return PseudoConnect().apply((as_variable(delegate_variable), *actual))
