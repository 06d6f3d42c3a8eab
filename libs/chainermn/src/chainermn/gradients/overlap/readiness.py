"""Know when the gradient of a parameter is final, while backward still goes on.

Chainer gives a parameter its gradient when the whole of backward is over. Here a tap is placed
under each parameter in the graph: a function that seems to have created it, ranked just below
the lowest of the functions that use it. Backward calls functions from the highest rank to the
lowest, so it comes to the tap as soon as the last of these has added its part.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import chainer
import numpy as np
from chainer.functions.util.forget import Forget
from chainer.variable import VariableNode


class Uses(NamedTuple):
    """How a graph uses a parameter.

    Attributes
    ----------
    times : int
        How often.
    lowest_rank : int
        Rank of the use that backward comes to last.
    """

    times: int
    lowest_rank: int


def find_uses(
    loss: chainer.Variable, parameters: Sequence[chainer.Parameter]
) -> dict[VariableNode, Uses] | None:
    """Look up where the graph behind ``loss`` uses each of ``parameters``.

    Returns
    -------
    dict of VariableNode to Uses, or None
        For the node of each parameter that is in the graph. None if the graph cannot tell,
        because of `chainer.functions.forget`: what is recomputed in backward is not in it.
    """
    nodes = {parameter.node for parameter in parameters}
    uses: dict[VariableNode, Uses] = {}
    seen = set()
    ahead = [loss.creator_node]
    while ahead:
        function = ahead.pop()
        if function is None or function in seen:
            continue
        if isinstance(function, Forget):
            return None
        seen.add(function)
        for node in function.inputs:
            if node.creator_node is not None:
                ahead.append(node.creator_node)
            elif node in nodes:
                times, lowest_rank = uses.get(node, (0, function.rank))
                uses[node] = Uses(times + 1, min(lowest_rank, function.rank))
    return uses


@contextlib.contextmanager
def taps(
    parameters: Sequence[chainer.Parameter],
    uses: Mapping[VariableNode, Uses],
    loss_scale: float | None,
    on_final: Callable[[chainer.Parameter], Any],
) -> Iterator[None]:
    """Have ``on_final`` called by a backward inside the ``with`` block, once for each parameter.

    The gradients are the same, bit by bit, as without.

    Parameters
    ----------
    parameters : sequence of chainer.Parameter
        One that already has a gradient, and is used more than once, is left alone: Chainer adds
        up the parts one by one, beginning with what is there.
    uses : dict of VariableNode to Uses
        What `find_uses` found.
    loss_scale : float, optional
        That of the backward.
    on_final : callable
        Called with a parameter as soon as its gradient is final.
    """
    anything = chainer.Variable(np.zeros(()))
    tapped = []
    for parameter in parameters:
        node = parameter.node
        if node in uses and (uses[node].times == 1 or parameter.grad_var is None):
            tap = _Tap(parameter, loss_scale, on_final)
            # Backward passes over functions none of whose inputs need a gradient.
            tap.inputs = (anything.node,)
            tap.outputs = (weakref.ref(node),)
            tap.rank = uses[node].lowest_rank - 0.5
            # Set by its property, it would change the rank of the parameter as well.
            node._creator_node = tap
            tapped.append(node)
    try:
        yield
    finally:
        for node in tapped:
            node._creator_node = None


class _Tap(chainer.FunctionNode):
    """Does for one parameter what Chainer does for all of them at the end of backward."""

    def __init__(
        self,
        parameter: chainer.Parameter,
        loss_scale: float | None,
        on_final: Callable[[chainer.Parameter], Any],
    ) -> None:
        self._parameter = parameter
        self._loss_scale = loss_scale
        self._on_final = on_final

    def backward(self, indexes: tuple[int, ...], grad_outputs: tuple[Any, ...]) -> tuple[None]:
        (gradient,) = grad_outputs
        if gradient is not None:
            parameter = self._parameter
            before = parameter.grad_var
            parameter.grad_var = (
                gradient if before is None else chainer.functions.add(before, gradient)
            )
            parameter._loss_scale = self._loss_scale
            self._on_final(parameter)
        return (None,)
