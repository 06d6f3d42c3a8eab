"""iDeep is gone; oneDNN stands in for it."""

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy

from chainer_compat import surgery
from chainer_fast.onednn import library

#: Modules of `chainer.functions` that can compute on arrays in oneDNN's layouts.
AWARE = frozenset(
    f"chainer.functions.{name}"
    for name in (
        "activation.leaky_relu",
        "activation.relu",
        "activation.sigmoid",
        "activation.tanh",
        "array.concat",
        "array.split_axis",
        "connection.convolution_2d",
        "connection.deconvolution_2d",
        "connection.linear",
        "math.basic_math",
        "math.sum",
        "noise.dropout",
        "normalization.batch_normalization",
        "normalization.local_response_normalization",
        "pooling.average_pooling_2d",
        "pooling.max_pooling_nd",
    )
)


def onednn_may_compute() -> bool:
    library.load()
    return "CHAINER_USE_IDEEP" not in os.environ


def onednn_is_there() -> bool:
    library.load()
    return True


def compute_with_onednn(module: ModuleType) -> None:
    """Let oneDNN compute what it can, unless the user has decided otherwise."""
    module.global_config.use_ideep = "auto"


def results_are_arrays_of_the_cpu(module: ModuleType) -> None:
    """Count oneDNN's results among the arrays of the device ``@numpy``, where it computes."""
    from chainer_fast.ideep4py import mdarray

    device = module.CpuDevice
    device.supported_array_types = (*device.supported_array_types, mdarray)
    device.is_array_supported = lambda self, array: isinstance(array, self.supported_array_types)


def only_by_channel(module: ModuleType) -> None:
    """Leave batch normalization over axes other than channels to NumPy.

    Chainer asks iDeep for any single axis, but iDeep always normalizes by channel.
    """
    mode = module._BNMode
    init = mode.__init__

    @surgery.replaces(mode, "__init__")
    def wrapped(self: Any, x: Any, gamma: Any, key_axis: tuple[int, ...], **options: Any) -> None:
        init(self, x, gamma, key_axis, **options)
        self.ideep_ok = self.ideep_ok and key_axis == (1,)


def numpy_for_others(module: ModuleType) -> None:
    """Give NumPy arrays to functions that do not know oneDNN, such as the user's own."""
    with_numpy = _converter(module)
    apply = module.FunctionNode.apply

    @surgery.replaces(module.FunctionNode, "apply")
    def wrapped(self: Any, inputs: Any) -> Any:
        if type(self).__module__ not in AWARE:
            inputs = list(map(with_numpy, inputs))
        return apply(self, inputs)


def numpy_for_old_functions(module: ModuleType) -> None:
    """Give NumPy arrays as gradients to functions that derive from ``chainer.Function``."""
    with_numpy = _converter(module)
    backward = module.FunctionAdapter.backward

    @surgery.replaces(module.FunctionAdapter, "backward")
    def wrapped(self: Any, indexes: Any, grad_outputs: Any) -> Any:
        return backward(self, indexes, tuple(map(with_numpy, grad_outputs)))


def _converter(module: ModuleType) -> Callable[[Any], Any]:
    """Return a function that converts arrays and variables to NumPy, but not parameters."""
    from chainer_fast.ideep4py import mdarray

    variable, parameter = module.variable.Variable, module.variable.Parameter

    def with_numpy(value: Any) -> Any:
        if isinstance(value, mdarray):
            return numpy.asarray(value)
        is_result = isinstance(value, variable) and not isinstance(value, parameter)
        if is_result and isinstance(value._data[0], mdarray):
            value._set_array(numpy.asarray(value._data[0]), layout_check=False)
        return value

    return with_numpy
