"""Make variables depend on each other without changing their values."""

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
        """Return zeros for the delegate, because its backward runs only with a gradient."""
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
        """Return zeros for the gradients of inputs if only the delegate was used."""
        delegate, *rest = gys
        gxs = or_zeros(rest, self._inputs)
        return gxs if delegate is None else PseudoConnect().apply((delegate, *gxs))


def pseudo_connect(
    delegate_variable: chainer.Variable | None, *actual_variables: chainer.Variable
) -> tuple[chainer.Variable, ...]:
    """Make variables depend on another variable, without changing their values.

    Backward then reaches ``delegate_variable`` from any of the results, after all functions that
    use the results. It gets a gradient of zeros.

    Use it to run backward through several graphs at once, and to control the order in which a
    rank communicates: the first call in forward must be the last call in backward.

    Parameters
    ----------
    delegate_variable : chainer.Variable or None
        Delegate variable that :func:`send` returned, or any other variable. None connects
        nothing.
    *actual_variables : chainer.Variable or ndarray
        Variables to make dependent on it.

    Returns
    -------
    tuple of chainer.Variable
        Variables with the arrays of ``actual_variables``; always a tuple.

    Raises
    ------
    TypeError
        If an argument is neither a variable nor an array.

    Examples
    --------
    Rank 0 sends an array to rank 1, and also has its own loss. One backward covers both:

    >>> x = chainer.Variable(np.array(3, np.float32))
    >>> if comm.rank == 0:
    ...     delegate = chainermn.functions.send(x, comm, rank=1)
    ...     (loss,) = chainermn.functions.pseudo_connect(delegate, 10 * x)
    ... else:
    ...     loss = chainermn.functions.recv(comm, rank=0) ** 2
    >>> loss.backward()
    >>> if comm.rank == 0:
    ...     print(x.grad)  # 10 from its own loss, and 2 * 3 from rank 1
    16.0
    """
    actual = tuple(as_variable(variable) for variable in actual_variables)
    if delegate_variable is None or not actual:
        return actual
    return PseudoConnect().apply((as_variable(delegate_variable), *actual))
