"""Compute ReLU, and the addition before it, with batch normalization, if a step is recorded."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from chainer_compat import surgery
from chainer_fast.channels_last.current_step import current_step


def fuse_with_normalization(module: ModuleType) -> None:
    """Let ReLU and additions ask the step whether a normalization computes them."""
    relu = importlib.import_module("chainer.functions.activation.relu")
    basic_math = importlib.import_module("chainer.functions.math.basic_math")
    variable = module.Variable
    array = variable.array
    rectify, gradient, add = relu.ReLU.forward_gpu, relu.ReLU.backward, basic_math.Add.forward

    @surgery.replaces(relu.ReLU, "forward_gpu")
    def forward_gpu(self: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        step = current_step()
        found = None if step is None else step.rectify(inputs[0])
        if found is None:
            return rectify(self, inputs)
        y, self.normalization = found
        self.retain_outputs((0,))
        return (y,)

    @surgery.replaces(relu.ReLU, "backward")
    def backward(self: Any, indexes: Any, grad_outputs: tuple[Any, ...]) -> Any:
        normalization = vars(self).get("normalization")
        if normalization is None or normalization.is_shared or module.config.enable_backprop:
            return gradient(self, indexes, grad_outputs)
        (gy,), (y,) = grad_outputs, self.get_retained_outputs()
        passed = normalization.pass_through(gy.array, y.array)
        # The normalization, the only one to get it, has computed its gradients already.
        return (gy if passed is gy.array else variable(passed, requires_grad=False),)

    @surgery.replaces(basic_math.Add, "forward")
    def forward(self: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        step = current_step()
        if step is None or len(inputs) != 2:
            return add(self, inputs)
        return (step.add(inputs, lambda: add(self, inputs)[0]),)

    def read(self: Any) -> Any:
        found = array.fget(self)
        if (step := current_step()) is not None:
            step.read(found)
        return found

    variable.array = property(read, array.fset, doc=array.__doc__)
