"""Where Chainer launches a kernel for each parameter, which takes the host longer than the GPU."""

import functools
from collections.abc import Sequence
from types import ModuleType, NoneType
from typing import Any, NamedTuple

import numpy

from chainer_compat.foreach import Calls, Later, type_of


def update_parameters_at_once(module: ModuleType) -> None:
    """Launch the kernels of an optimizer once for all parameters."""
    original = module.GradientMethod.update

    @functools.wraps(original)
    def update(self: Any, lossfun: Any = None, *args: Any, **kwds: Any) -> None:
        if lossfun is not None:
            loss = lossfun(*args, **kwds)
            if getattr(self, "_use_cleargrads", True):
                self.target.cleargrads()
            else:
                self.target.zerograds()
            loss.backward(loss_scale=self._loss_scale)
            del loss
        self.reallocate_cleared_grads()
        self.check_nan_in_grads()
        self.call_hooks("pre")
        self.t += 1
        if self.is_safe_to_update():
            _update(list(self.target.params()), module.chainer)
        self.reallocate_cleared_grads()
        self.call_hooks("post")
        self.update_loss_scale()

    reallocate = module.GradientMethod.reallocate_cleared_grads

    @functools.wraps(reallocate)
    def reallocate_cleared_grads(self: Any) -> None:
        with module.variable._AllowArrayAccessWithNonstandardLayout():
            some_are_missing = any(each.grad is None for each in self.target.params(False))
        if some_are_missing:
            reallocate(self)

    module.GradientMethod.update = update
    module.GradientMethod.reallocate_cleared_grads = reallocate_cleared_grads


def _update(parameters: Sequence[Any], chainer: ModuleType) -> None:
    """Take the steps of all parameters."""
    cuda = chainer.backends.cuda
    steps = [step for each in parameters if (step := _step(each, cuda.ndarray))]
    devices = {step.array.device.id for step in steps}
    addresses = [array.data.ptr for step in steps for array in (step.array, step.gradient)]
    if len(devices) > 1 or len(set(addresses)) < len(addresses):
        steps = []
    at_once = {id(step.parameter) for step in steps}
    for parameter in parameters:
        if id(parameter) not in at_once:
            parameter.update()
    if steps:
        with chainer.using_device(steps[0].parameter.device):
            _take(steps, cuda)


class _Step(NamedTuple):
    """A step that needs nothing but kernels of Chainer's on one GPU."""

    parameter: Any
    array: Any
    gradient: Any
    #: The array that the step changes, of which ``array`` may be a copy in float16.
    data: Any


def _step(parameter: Any, gpu_array: Any) -> _Step | None:
    """Return the step of a parameter, if it is one with nothing unusual about it."""
    rule = parameter.update_rule
    if not type(rule).__module__.startswith("chainer.optimizers.") or not rule.enabled:
        return None
    if parameter.layout is not None or type(parameter._loss_scale) not in (int, float, NoneType):
        return None
    hooks = rule._hookable
    if hooks._pre_update_hooks or hooks._post_update_hooks:
        return None
    array, gradient = parameter.array, parameter.grad
    data: Any = array
    if isinstance(array, gpu_array) and array.dtype == numpy.float16:
        # It has the other copy from its first step on.
        data = getattr(rule._fp32_param, "array", None) if rule._use_fp32_update else None
    on_gpu = [array, gradient, data, *(rule.state or {}).values()]
    if rule.state is None or not all(isinstance(each, gpu_array) for each in on_gpu):
        return None
    if array.size == 0 or data.dtype not in (numpy.float32, numpy.float64):
        return None
    return _Step(parameter, array, gradient, data)


def _take(steps: Sequence[_Step], cuda: ModuleType) -> None:
    """Do for all parameters what ``UpdateRule.update`` does for one."""
    unscale = cuda.elementwise("T scale", "T gradient", "gradient /= scale", "unscale")
    before, updates = Calls(cuda.cupy), Calls(cuda.cupy)
    copies = []
    for parameter, array, gradient, data in steps:
        scale = parameter._loss_scale
        later = Later(gradient, updates)
        if data is not array:
            # Whoever has the old array keeps the old numbers, as with Chainer.
            copy = cuda.cupy.empty(array.shape, array.dtype)
            copies.append((parameter, copy))
            later = _NarrowGradient(gradient, updates, scale or 1, data, copy)
        elif scale is not None:
            before.add(unscale, scale, gradient)
            parameter._set_grad_without_check(gradient)
        parameter.update_rule.t += 1
        parameter.update_rule.update_core_gpu(_Updated(data, later))
    before.run()
    updates.run()
    for parameter, copy in copies:
        parameter.array = copy


class _Updated:
    """As much of a parameter as update rules need."""

    __slots__ = "data", "dtype", "grad"

    def __init__(self, data: Any, grad: Any) -> None:
        self.data, self.dtype, self.grad = data, data.dtype, grad


class _NarrowGradient(Later):
    """A gradient in float16 of a parameter that is updated in float32, and then copied."""

    def __init__(self, array: Any, calls: Calls, scale: float, data: Any, copy: Any) -> None:
        super().__init__(array, calls)
        self._scale, self._data, self._copy = scale, data, copy
        self.dtype = data.dtype

    def __cupy_override_elementwise_kernel__(self, kernel: Any, *args: Any) -> None:
        gradient, *others = args
        assert gradient is self
        assert others[kernel.nin - 1] is self._data
        self.calls.add(_around_float16(kernel), self.array, self._scale, *others, self._copy)


@functools.cache
def _around_float16(kernel: Any) -> Any:
    """Return the kernel of an update rule, given a scaled gradient, and what to copy data to."""
    gradient, *others = kernel.in_params
    declare = lambda param: f"{'raw ' * param.raw}{type_of(param)} {param.name}"  # noqa: E731
    inputs = ["S narrow_gradient", f"{type_of(gradient)} narrow_scale", *map(declare, others)]
    return type(kernel)(
        ", ".join(inputs),
        ", ".join([*map(declare, kernel.out_params), "S narrow_data"]),
        f"const {gradient.ctype} {gradient.name} = "
        f"({gradient.ctype})narrow_gradient / narrow_scale;\n"
        f"{kernel.operation};\n"
        f"narrow_data = (S){kernel.out_params[0].name}",
        f"{kernel.name}_around_float16",
        preamble=kernel.preamble,
        **kernel.kwargs,
    )
