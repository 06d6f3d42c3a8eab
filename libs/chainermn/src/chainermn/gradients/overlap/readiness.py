"""Find out when the gradient of a parameter is final, while backward is still running.

Chainer gives a parameter its gradient only when all of backward is done. So each parameter in the
graph gets a hook: a function that appears to be its creator, and whose rank is just below the
lowest rank of the functions that use the parameter. Backward calls functions from the highest rank
to the lowest, so it calls the hook as soon as the last of them has contributed to the gradient.
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
    """A graph's uses of a parameter."""

    times: int
    lowest_rank: int  # rank, in the graph, of the user function that backward calls last


def find_uses(
    loss: chainer.Variable, parameters: Sequence[chainer.Parameter]
) -> dict[VariableNode, Uses] | None:
    """Find the uses of ``parameters`` in the graph behind ``loss``.

    Returns None if the graph contains `chainer.functions.forget`, since functions that backward
    recomputes are not in the graph.
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
def gradient_hooks(
    parameters: Sequence[chainer.Parameter],
    uses: Mapping[VariableNode, Uses],
    loss_scale: Any,
    on_final: Callable[[chainer.Parameter], Any],
) -> Iterator[None]:
    """Make a backward in the ``with`` block call ``on_final`` once for each parameter.

    The gradients are bitwise identical to those without hooks. So a parameter that already has a
    gradient and is used several times gets no hook: Chainer would add the contributions to the
    existing gradient one by one, rather than their sum.
    """
    anything = chainer.Variable(np.zeros(()))
    hooked = []
    for parameter in parameters:
        node = parameter.node
        if node in uses and (uses[node].times == 1 or parameter.grad_var is None):
            hook = _Hook(parameter, loss_scale, on_final)
            # Backward skips functions if none of their inputs requires a gradient.
            hook.inputs = (anything.node,)
            hook.outputs = (weakref.ref(node),)
            hook.rank = uses[node].lowest_rank - 0.5
            # The property `creator_node` would also change the rank of the parameter.
            node._creator_node = hook
            hooked.append(node)
    try:
        yield
    finally:
        for node in hooked:
            node._creator_node = None


class _Hook(chainer.FunctionNode):
    """Sets a parameter's gradient now, as Chainer does for all at the end of backward."""

    label = "hand over"  # in timelines, beside the functions of layers

    def __init__(
        self,
        parameter: chainer.Parameter,
        loss_scale: Any,
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
