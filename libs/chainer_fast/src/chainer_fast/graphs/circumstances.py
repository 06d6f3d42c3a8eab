"""What must stay as it was for a graph to do the same as the script's own code.

A graph repeats kernels, not Python code. So everything plain that the code may read is compared
before each launch: settings of Chainer, of the optimizer and of links.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

from chainer_fast.graphs.inputs import NotRecordable

_PLAIN = (int, float, bool, str, bytes, tuple, type(None))
# Attributes of an optimizer that change in each step, and that a recorded step reads on the GPU.
_OF_STEPS = {"t", "epoch", "_loss_scale", "_loss_scaling_isnan", "_loss_scaling_isnan_ever"}


def circumstances(optimizer: Any, chainer: ModuleType) -> Hashable:
    """Return what a graph depends on besides arrays; equal if it has not changed.

    Raises
    ------
    NotRecordable
        If the script's own code runs in a step besides the model's, so that it cannot be told
        what it depends on.
    """
    config = {**vars(chainer.global_config), **vars(chainer.config._local)}
    rules = [parameter.update_rule for parameter in optimizer.target.params()]
    return (
        *[(name, _hashable(value)) for name, value in config.items()],
        *_plain(vars(optimizer), without=_OF_STEPS),
        vars(optimizer).get("_loss_scale") is None,
        *_hooks(optimizer),
        *[(type(rule), rule.enabled, *vars(rule.hyperparam)) for rule in rules if rule],
        *[item for link in optimizer.target.links() for item in _plain(vars(link))],
    )


def why_not_now(optimizer: Any, chainer: ModuleType) -> str | None:
    """Return what prevents graphs at the moment, or None."""
    if chainer.is_debug():
        return "Chainer's debug mode looks at values"
    if chainer.get_function_hooks() or chainer._get_link_hooks():
        return "a hook of functions or links is active"
    return None


def why_not(optimizer: Any) -> str | None:
    """Return what prevents graphs for good, or None."""
    for timing in ("pre", "post"):
        for name, hook in _hooks_at(optimizer, timing).items():
            if not type(hook).__module__.startswith(("chainer.", "chainermn.")):
                return f"the hook {name!r} of the optimizer is the script's own code"
    return None


def pre_hooks(optimizer: Any) -> list[Any]:
    """Return the hooks that run before the update."""
    return list(_hooks_at(optimizer, "pre").values())


def places(optimizer: Any) -> Iterator[Any]:
    """Yield all arrays that steps write in place: parameters, their states, persistent values.

    An array that is missing is yielded as None.
    """
    for parameter in optimizer.target.params():
        yield parameter.array
        rule = parameter.update_rule
        if rule is not None:
            yield from (rule.state or {}).values()
            yield getattr(rule._fp32_param, "array", None)
    yield from persistent_arrays(optimizer.target)


def persistent_arrays(model: Any) -> Iterator[Any]:
    """Yield the persistent values of a model that are arrays."""
    for link in model.links():
        for name in sorted(link._persistent):
            value = getattr(link, name, None)
            if hasattr(value, "dtype") and hasattr(value, "data"):
                yield value


def names_of_places(optimizer: Any) -> list[str]:
    """Return names for the arrays of `places`, for messages."""
    found = []
    for name, parameter in optimizer.target.namedparams():
        found.append(name)
        rule = parameter.update_rule
        if rule is not None:
            found += [f"{key} of {name}" for key in rule.state or {}]
            found.append(f"the float32 copy of {name}")
    for path, link in optimizer.target.namedlinks():
        for key in sorted(link._persistent):
            value = getattr(link, key, None)
            if hasattr(value, "dtype") and hasattr(value, "data"):
                found.append(f"{path}/{key}".replace("//", "/"))
    return found


def rule_values(optimizer: Any) -> list[Any]:
    """Return the plain attributes of update rules, which only eager steps change."""
    rules = [parameter.update_rule for parameter in optimizer.target.params()]
    return [_plain(vars(rule), without={"t"}) for rule in rules if rule is not None]


def _hooks(optimizer: Any) -> Iterator[Any]:
    for timing in ("pre", "post"):
        for name, hook in _hooks_at(optimizer, timing).items():
            rate = {"rate"} if type(hook).__name__ == "WeightDecay" else set()
            yield timing, name, type(hook), *_plain(getattr(hook, "__dict__", {}), without=rate)


def _hooks_at(optimizer: Any, timing: str) -> Mapping[str, Any]:
    hookable = optimizer._hookable
    found: Mapping[str, Any] = getattr(hookable, f"_{timing}_update_hooks")
    return found


def _plain(values: Mapping[str, Any], without: Iterable[str] = ()) -> tuple[Any, ...]:
    """Return the items whose values are plain."""
    return tuple(
        [
            (name, _hashable(value))
            for name, value in values.items()
            if isinstance(value, _PLAIN) and name not in without
        ]
    )


def _hashable(value: Any) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return type(value), id(value)
    return value


def key_of_function(function: Any) -> Hashable:
    """Return what identifies a loss function: functions that the same line makes again are equal.

    Raises
    ------
    NotRecordable
        If it cannot be told whether it is the same.
    """
    code = getattr(function, "__code__", None)
    if code is None:
        return _hashable(function)
    cells = [each.cell_contents for each in function.__closure__ or ()]
    if any(hasattr(each, "dtype") for each in cells):
        raise NotRecordable(
            f"{function.__qualname__} gets arrays from outside: pass them as arguments of update()"
        )
    return code, tuple(_hashable(each) for each in (*cells, *(function.__defaults__ or ())))
