"""Take the steps of many parameters with few kernels, in a CUDA graph too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import ModuleType, NoneType
from typing import Any, NamedTuple

import numpy

from chainer_fast.channels_last.layout import lie_alike
from chainer_fast.foreach import Call, Calls, Later, Recording

#: Largest number of elements of gradients that a launch covers: 256 MiB in float32.
MOST_ELEMENTS = 1 << 26

# Numbers of the collections of calls in a recording; those of weight decay follow.
_LOOK, _BEFORE, _HOOKS, _UPDATES, _AFTER, _DECAY = range(6)


class Step(NamedTuple):
    """A step that only needs Chainer's own kernels on one GPU."""

    parameter: Any
    array: Any
    gradient: Any
    #: Array that the step changes; ``array`` may be a float16 copy of it.
    data: Any
    #: The arrays above, and the state of the update rule.
    all_arrays: list[Any]

    @property
    def rule(self) -> Any:
        """The update rule."""
        return self.parameter.update_rule


def update(parameters: Sequence[Any], chainer: ModuleType, *, in_place: bool = False) -> None:
    """Take the steps of all parameters.

    By default, float16 parameters get new arrays, as with Chainer.
    """
    cuda = chainer.backends.cuda
    numbers = int, float, NoneType
    usual = [each for each in parameters if type(each._loss_scale) in numbers]
    steps = [step for each in usual if (step := step_of(each, chainer))]
    # Shared update rules share their state, and a state from another device must be moved.
    if not lie_apart([each for step in steps for each in step.all_arrays], cuda.ndarray):
        steps = []
    at_once = {id(step.parameter) for step in steps}
    for parameter in parameters:
        if id(parameter) not in at_once:
            before = parameter.array
            parameter.update()
            if in_place and before is not None and parameter.array is not before:
                before[...] = parameter.array
                parameter.array = before
    for portion in _portions(steps):
        with chainer.using_device(portion[0].parameter.device):
            _take(portion, cuda, in_place=in_place)


def lie_apart(arrays: Sequence[Any], gpu_array: Any) -> bool:
    """Return whether arrays are on the same GPU and have different addresses."""
    if not all(isinstance(array, gpu_array) for array in arrays):
        return False
    addresses = {array.data.ptr for array in arrays}
    return len(addresses) == len(arrays) and len({array.device.id for array in arrays}) == 1


def look(
    gradients: Iterable[Any], found: Any, cuda: ModuleType, recording: Recording | None = None
) -> None:
    """Set ``found``, an array of bool without axes, to true if a gradient is not finite."""
    kernel = cuda.elementwise(
        "T gradient, uint64 found", "", "if (!isfinite(gradient)) *(bool*)found = true", "look"
    )
    calls = Calls(cuda.cupy, recording, _LOOK)
    for gradient in gradients:
        calls.add(kernel, gradient, found.data.ptr)
    calls.run()


def is_weight_decay(hook: Any) -> bool:
    """Return whether a hook is Chainer's weight decay."""
    return type(hook).__module__ == "chainer.optimizer_hooks.weight_decay"


def decay(hook: Any, parameters: Sequence[Any], cuda: ModuleType) -> None:
    """Apply weight decay to all parameters."""
    calls = Calls(cuda.cupy)
    for each in parameters:
        updated = _Updated(each.array, Later(each.grad, calls), each.device, each._loss_scale)
        hook(each.update_rule, updated)
    with parameters[0].device.create_context():
        calls.run()


def step_of(parameter: Any, chainer: ModuleType) -> Step | None:
    """Return the step of a parameter, or None if anything about it is unusual.

    Gradient and state are brought into the parameter's order in memory.
    """
    gpu_array = chainer.backends.cuda.ndarray
    rule = parameter.update_rule
    if type(parameter).update is not chainer.Parameter.update:
        return None
    if not type(rule).__module__.startswith("chainer.optimizers.") or not rule.enabled:
        return None
    if parameter.layout is not None:
        return None
    if rule._hookable._post_update_hooks:
        return None
    hooks = list(rule._hookable._pre_update_hooks.values())
    if len(hooks) > 1 or not all(map(is_weight_decay, hooks)):
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
    step = Step(parameter, array, gradient, data, all_arrays)
    if lie_alike(all_arrays) or not lie_alike([array]):
        return step
    _bring_into_order(step, chainer.backends.cuda.cupy)
    return step_of(parameter, chainer)


def _bring_into_order(step: Step, xp: Any) -> None:
    """Let gradient, state and float32 copy lie in memory as the parameter does."""
    rule, like = step.rule, step.array
    step.parameter._set_grad_without_check(_laid_like(xp, step.gradient, like))
    rule.state.update({name: _laid_like(xp, array, like) for name, array in rule.state.items()})
    if step.data is not like:
        rule._fp32_param.array = _laid_like(xp, step.data, like)


def _laid_like(xp: Any, array: Any, other: Any) -> Any:
    """Return an array, or a copy of it that lies in memory as another array does."""
    if lie_alike([array, other]):
        return array
    copy = xp.empty_like(other, dtype=array.dtype)
    copy[...] = array
    return copy


def _portions(steps: Iterable[Step]) -> Iterator[list[Step]]:
    """Divide steps into portions of one step, or of up to `MOST_ELEMENTS`."""
    portion: list[Step] = []
    n = 0
    for step in steps:
        if portion and n + step.array.size > MOST_ELEMENTS:
            yield portion
            portion, n = [], 0
        portion.append(step)
        n += step.array.size
    if portion:
        yield portion


def _take(steps: Sequence[Step], cuda: ModuleType, *, in_place: bool) -> None:
    """Do for all parameters what ``UpdateRule.update`` does for one."""
    widen = cuda.elementwise("S narrow, T scale", "T wide", "wide = (T)narrow / scale", "widen")
    unscale = cuda.elementwise("T scale", "T gradient", "gradient /= scale", "unscale")
    before, hooks, updates, after = (Calls(cuda.cupy) for _ in range(4))
    copies = []
    for step in steps:
        parameter, scale = step.parameter, step.parameter._loss_scale
        gradient = step.gradient
        if step.data is not step.array:
            gradient = cuda.cupy.empty_like(step.data)
            before.add(widen, step.gradient, scale or 1, gradient)
            # Other references to the old array keep the old values, as with Chainer.
            copy = step.array if in_place else cuda.cupy.empty_like(step.array)
            after.add(_narrow(cuda), step.data, copy)
            copies.append((parameter, copy))
            scale = None
        elif scale is not None:
            before.add(unscale, scale, gradient)
            parameter._set_grad_without_check(gradient)
        step.rule.t += 1
        _call_rule(step, gradient, hooks, updates, scale)
    for calls in (before, hooks, updates, after):
        calls.run()
    for parameter, copy in copies:
        if parameter.array is not copy:
            parameter.array = copy


def _narrow(cuda: ModuleType) -> Any:
    return cuda.elementwise("T wide", "S narrow", "narrow = (S)wide", "narrow")


def _call_rule(step: Step, gradient: Any, hooks: Calls, updates: Calls, scale: Any) -> None:
    """Collect the calls that an update rule and its hooks make."""
    device = step.parameter.device
    for hook in step.rule._hookable._pre_update_hooks.values():
        hook(step.rule, _Updated(step.data, Later(gradient, hooks), device, scale))
    step.rule.update_core_gpu(_Updated(step.data, Later(gradient, updates), device, scale))


class RecordedSteps:
    """The steps of all parameters in a CUDA graph.

    Learning rates and all other numbers lie in GPU memory; `numbers` are those of the next step.
    Kernels do nothing if ``recording.skip`` is true.

    Parameters
    ----------
    parameters
        Parameters with gradients.
    decays
        Hooks of the optimizer that are Chainer's weight decay.
    chainer
        The module.
    recording
        Recording that takes the numbers.
    scale
        Loss scale, an array of float64 without axes, or None.

    Raises
    ------
    ValueError
        If a parameter needs more than Chainer's own kernels.
    """

    def __init__(
        self,
        parameters: Sequence[Any],
        decays: Sequence[Any],
        chainer: ModuleType,
        recording: Recording,
        scale: Any,
    ) -> None:
        self._chainer, self._cuda = chainer, chainer.backends.cuda
        self._decays, self._recording, self._scale = decays, recording, scale
        self.steps: list[Step] = []
        for each in parameters:
            if each.update_rule is None or not each.update_rule.enabled:
                continue
            step = step_of(each, chainer)
            if step is None:
                raise ValueError(
                    f"the update of parameter {each.name}, of shape {each.shape}, needs more than "
                    "Chainer's own kernels"
                )
            self.steps.append(step)
        arrays = [each for step in self.steps for each in step.all_arrays]
        if not lie_apart(arrays, self._cuda.ndarray):
            raise ValueError("parameters share arrays or update rules, or lie on several GPUs")
        self._rules = [(step.rule, vars(step.rule.hyperparam)) for step in self.steps]
        parents = {id(parent): parent for _, own in self._rules if (parent := own["_parent"])}
        self._shared = [vars(parent) for parent in parents.values()]
        self._last: Any = None
        # A graph is for rules with the same hooks.
        self._with_hooks = [rule for rule, _ in self._rules if _hook_rates(rule)]

    def enqueue_decay(self, hook: Any) -> None:
        """Enqueue weight decay for all parameters, as a hook of the optimizer applies it."""
        cuda, scale = self._cuda, self._scale
        decay = cuda.elementwise("T p, T rate", "T g", "g += rate * p", "decay_by")
        scaled = cuda.elementwise(
            "T p, float64 rate, raw float64 scale",
            "T g",
            "g += (T)(rate * scale[0]) * p",
            "decay_scaled_by",
        )
        calls = Calls(cuda.cupy, self._recording, _DECAY + self._decays.index(hook))
        for owner, step in enumerate(self.steps):
            calls.owner = owner
            if scale is not None and step.parameter._loss_scale is not None:
                calls.add(scaled, step.array, hook.rate, scale, step.gradient)
            else:
                calls.add(decay, step.array, hook.rate, step.gradient)
        calls.run()

    def enqueue(self) -> None:
        """Enqueue the steps."""
        first = 0
        for portion in _portions(self.steps):
            self._enqueue(portion, first)
            first += len(portion)

    def _enqueue(self, steps: Sequence[Step], first: int) -> None:
        cuda, scale = self._cuda, self._scale
        widen = cuda.elementwise(
            "S narrow, raw float64 scale", "T wide", "wide = (T)narrow / (T)scale[0]", "widen_by"
        )
        widen_unscaled = cuda.elementwise("S narrow", "T wide", "wide = (T)narrow", "widen_all")
        unscale = cuda.elementwise(
            "raw float64 scale", "T gradient", "gradient /= (T)scale[0]", "unscale_by"
        )
        before, hooks, updates, after = (
            Calls(cuda.cupy, self._recording, number)
            for number in (_BEFORE, _HOOKS, _UPDATES, _AFTER)
        )
        for owner, step in enumerate(steps, first):
            gradient = step.gradient
            is_scaled = scale is not None and step.parameter._loss_scale is not None
            if step.data is not step.array:
                gradient = cuda.cupy.empty_like(step.data)
                if is_scaled:
                    before.add(widen, step.gradient, scale, gradient)
                else:
                    before.add(widen_unscaled, step.gradient, gradient)
                after.add(_narrow(cuda), step.data, step.array)
            elif is_scaled:
                before.add(unscale, scale, gradient)
            hooks.owner = updates.owner = owner
            _call_rule(step, gradient, hooks, updates, None)
        for calls in (before, hooks, updates, after):
            calls.run()

    @property
    def rules(self) -> list[Any]:
        """The update rules of the recorded steps."""
        return [rule for rule, _ in self._rules]

    def count(self, n: int) -> None:
        """Count ``n`` steps in all update rules."""
        for rule, _ in self._rules:
            vars(rule)["t"] += n

    def depends_on_t(self) -> bool:
        """Return whether numbers depend on how many steps were taken."""
        before = self._all_numbers()
        self.count(1)
        after = self._all_numbers()
        self.count(-1)
        return before != after

    def numbers(self, uses_t: bool) -> list[Mapping[Call, Any]] | None:
        """Return the numbers of the next step by parameter, or None if they have not changed.

        ``t`` of the rules is already that of the step; ``uses_t`` tells whether numbers depend on
        it.
        """
        everything = (
            [vars(rule)["t"] for rule, _ in self._rules] if uses_t else 0,
            # Besides its parent, most have none of their own.
            [list(own.values()) if len(own) > 1 else None for _, own in self._rules],
            [_hook_rates(rule) for rule in self._with_hooks],
            [list(shared.values()) for shared in self._shared],
            [hook.rate for hook in self._decays],
        )
        if everything == self._last:
            return None
        self._last = everything
        return self._all_numbers()

    def _all_numbers(self) -> list[Mapping[Call, Any]]:
        found: list[Mapping[Call, Any]] = []
        known: dict[Any, Mapping[Call, Any]] = {}
        of_decays = {Call(_DECAY + k, 0, 1): hook.rate for k, hook in enumerate(self._decays)}
        for step, (rule, own) in zip(self.steps, self._rules, strict=True):
            key = type(rule), step.data.dtype, vars(rule)["t"], *own.items(), *_hook_rates(rule)
            if key not in known:
                known[key] = self._of_one(step) | of_decays
            found.append(known[key])
        return found

    def _of_one(self, step: Step) -> dict[Call, Any]:
        hooks = Calls(self._cuda.cupy, self._recording, _HOOKS)
        updates = Calls(self._cuda.cupy, self._recording, _UPDATES)
        # Nothing is launched. Gradients of float16 parameters are widened for their rules.
        _call_rule(step, step.data, hooks, updates, None)
        return hooks.numbers() | updates.numbers()


def _hook_rates(rule: Any) -> list[Any]:
    return [hook.rate for hook in rule._hookable._pre_update_hooks.values()]


class _Updated:
    """The attributes of a parameter that update rules and weight decay need."""

    def __init__(self, data: Any, grad: Any, device: Any, loss_scale: float | None) -> None:
        self.data, self.grad, self.device, self._loss_scale = data, grad, device, loss_scale
        self.dtype = data.dtype
