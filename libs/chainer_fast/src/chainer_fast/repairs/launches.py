"""Launch fewer kernels: with one per parameter, launching takes longer than computing."""

from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType, NoneType
from typing import Any, NamedTuple

import numpy

from chainer_compat import surgery
from chainer_fast.foreach import Calls, Later

#: Largest number of elements of gradients that a launch covers: 256 MiB in float32.
MOST_ELEMENTS = 1 << 26


def update_parameters_at_once(module: ModuleType) -> None:
    """Launch the kernels of an optimizer once for all parameters."""

    @surgery.replaces(module.GradientMethod, "update")
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

    @surgery.replaces(module.GradientMethod, "reallocate_cleared_grads")
    def reallocate_cleared_grads(self: Any) -> None:
        with module.variable._AllowArrayAccessWithNonstandardLayout():
            some_are_missing = any(each.grad is None for each in self.target.params(False))
        if some_are_missing:
            reallocate(self)

    call_hook = module.Optimizer.call_hook

    @surgery.replaces(module.Optimizer, "call_hook")
    def call_hook_at_once(self: Any, hook: Any) -> None:
        cuda = module.chainer.backends.cuda
        if _is_weight_decay(hook):
            parameters = [p for p in self.target.params() if p.array is not None]
            if _lie_apart([each for p in parameters for each in (p.array, p.grad)], cuda.ndarray):
                _decay(hook, parameters, cuda)
                return
        call_hook(self, hook)


class _Step(NamedTuple):
    """A step that only needs Chainer's own kernels on one GPU."""

    parameter: Any
    array: Any
    gradient: Any
    #: Array that the step changes; ``array`` may be a float16 copy of it.
    data: Any
    #: The arrays above, and the state of the update rule.
    all_arrays: list[Any]


def _update(parameters: Sequence[Any], chainer: ModuleType) -> None:
    """Take the steps of all parameters."""
    cuda = chainer.backends.cuda
    steps = [step for each in parameters if (step := _step(each, chainer))]
    # Shared update rules share their state, and a state from another device must be moved.
    if not _lie_apart([each for step in steps for each in step.all_arrays], cuda.ndarray):
        steps = []
    at_once = {id(step.parameter) for step in steps}
    for parameter in parameters:
        if id(parameter) not in at_once:
            parameter.update()
    for portion in _portions(steps):
        with chainer.using_device(portion[0].parameter.device):
            _take(portion, cuda)


def _portions(steps: Iterable[_Step]) -> Iterator[list[_Step]]:
    """Divide steps into portions of one step, or of up to `MOST_ELEMENTS`."""
    portion: list[_Step] = []
    n = 0
    for step in steps:
        if portion and n + step.array.size > MOST_ELEMENTS:
            yield portion
            portion, n = [], 0
        portion.append(step)
        n += step.array.size
    if portion:
        yield portion


def _lie_apart(arrays: Sequence[Any], gpu_array: Any) -> bool:
    """Return whether arrays are on the same GPU and have different addresses."""
    if not all(isinstance(array, gpu_array) for array in arrays):
        return False
    addresses = {array.data.ptr for array in arrays}
    return len(addresses) == len(arrays) and len({array.device.id for array in arrays}) == 1


def _step(parameter: Any, chainer: ModuleType) -> _Step | None:
    """Return the step of a parameter, or None if anything about it is unusual."""
    gpu_array = chainer.backends.cuda.ndarray
    rule = parameter.update_rule
    if type(parameter).update is not chainer.Parameter.update:
        return None
    if not type(rule).__module__.startswith("chainer.optimizers.") or not rule.enabled:
        return None
    if parameter.layout is not None or type(parameter._loss_scale) not in (int, float, NoneType):
        return None
    if rule._hookable._post_update_hooks:
        return None
    hooks = list(rule._hookable._pre_update_hooks.values())
    if len(hooks) > 1 or not all(map(_is_weight_decay, hooks)):
        return None
    array, gradient = parameter.array, parameter.grad
    data: Any = array
    if isinstance(array, gpu_array) and array.dtype == numpy.float16:
        # The float32 copy exists after the first step.
        data = getattr(rule._fp32_param, "array", None) if rule._use_fp32_update else None
    all_arrays = [array, gradient, *(rule.state or {}).values()]
    if data is not array:
        all_arrays.append(data)
    if rule.state is None or not all(isinstance(each, gpu_array) for each in all_arrays):
        return None
    if array.size == 0 or data.dtype not in (numpy.float32, numpy.float64):
        return None
    return _Step(parameter, array, gradient, data, all_arrays)


def _take(steps: Sequence[_Step], cuda: ModuleType) -> None:
    """Do for all parameters what ``UpdateRule.update`` does for one."""
    widen = cuda.elementwise("S narrow, T scale", "T wide", "wide = (T)narrow / scale", "widen")
    unscale = cuda.elementwise("T scale", "T gradient", "gradient /= scale", "unscale")
    narrow = cuda.elementwise("T wide", "S narrow", "narrow = (S)wide", "narrow")
    before, hooks, updates, after = (Calls(cuda.cupy) for _ in range(4))
    copies = []
    for parameter, array, gradient, data, _ in steps:
        rule, scale = parameter.update_rule, parameter._loss_scale
        if data is not array:
            wide = cuda.cupy.empty(data.shape, data.dtype)
            before.add(widen, gradient, scale or 1, wide)
            # Other references to the old array keep the old values, as with Chainer.
            copy = cuda.cupy.empty(array.shape, array.dtype)
            after.add(narrow, data, copy)
            copies.append((parameter, copy))
            gradient, scale = wide, None
        elif scale is not None:
            before.add(unscale, scale, gradient)
            parameter._set_grad_without_check(gradient)
        rule.t += 1
        for hook in rule._hookable._pre_update_hooks.values():
            hook(rule, _Updated(data, Later(gradient, hooks), parameter.device, scale))
        rule.update_core_gpu(_Updated(data, Later(gradient, updates), parameter.device, scale))
    for calls in (before, hooks, updates, after):
        calls.run()
    for parameter, copy in copies:
        parameter.array = copy


def _is_weight_decay(hook: Any) -> bool:
    return type(hook).__module__ == "chainer.optimizer_hooks.weight_decay"


def _decay(hook: Any, parameters: Sequence[Any], cuda: ModuleType) -> None:
    """Apply weight decay to all parameters."""
    calls = Calls(cuda.cupy)
    for each in parameters:
        updated = _Updated(each.array, Later(each.grad, calls), each.device, each._loss_scale)
        hook(each.update_rule, updated)
    with parameters[0].device.create_context():
        calls.run()


class _Updated:
    """The attributes of a parameter that update rules and weight decay need."""

    def __init__(self, data: Any, grad: Any, device: Any, loss_scale: float | None) -> None:
        self.data, self.grad, self.device, self._loss_scale = data, grad, device, loss_scale
        self.dtype = data.dtype
