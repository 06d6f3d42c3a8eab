"""What must stay as it was for a graph to do the same as the script's own code.

A graph repeats kernels, not Python code. So everything plain that the code may read is compared
before each launch: settings of Chainer, of the optimizer and of links.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from operator import is_, itemgetter
from typing import Any

import chainer

from chainer_fast.graphs.inputs import NotRecordable

_PLAIN = (int, float, bool, str, bytes, tuple, type(None))
# Attributes of an optimizer that change in each step, and that a recorded step reads on the GPU.
_OF_STEPS = {
    "t",
    "epoch",
    "_ahead",
    "_loss_scale",
    "_loss_scaling_isnan",
    "_loss_scaling_isnan_ever",
}


class Circumstances:
    """What graphs of an optimizer depend on, besides arguments.

    Looking at everything takes long. So a look first finds out whether anything was assigned since
    the last one.

    Attributes
    ----------
    arrays : list of array or None
        All arrays that steps write in place: parameters, their states, persistent values.
    number : int
        Number of the current settings: the same again if they are.
    """

    def __init__(self) -> None:
        self.arrays: list[Any] = []
        self.number = 0
        self._numbers: dict[Hashable, int] = {}
        self._optimizer: Any = None
        self._mappings: list[tuple[Mapping[str, Any], list[Any]]] = []
        self._lists: list[tuple[list[Any], list[Any]]] = []
        self._rules: list[tuple[Mapping[str, Any], tuple[Any, ...]]] = []
        self._parameters: list[tuple[Any, Any, Any]] = []
        self._of_optimizer: Hashable = None
        #: Hyperparameters of single parameters, and how many there are.
        self._own: list[tuple[Mapping[str, Any], int]] = []

    def look(self, optimizer: Any) -> bool:
        """Look at everything; return whether the arrays are those of the last look."""
        of_optimizer = (
            *_plain(vars(optimizer), without=_OF_STEPS),
            vars(optimizer).get("_loss_scale") is None,
            *_switches(optimizer.hyperparam),
        )
        if self._is_as_before(optimizer) and of_optimizer == self._of_optimizer:
            return True
        before, self.arrays = self.arrays, list(_places(optimizer))
        key = (id(optimizer.target), *of_optimizer, *_settings(optimizer))
        self.number = self._numbers.setdefault(key, len(self._numbers))
        self._note(optimizer, of_optimizer)
        return len(before) == len(self.arrays) and all(map(is_, before, self.arrays))

    def note_attributes(self, links: Iterable[Any]) -> None:
        """Take it as seen that these links have got new results of a step as attributes."""
        changed = {id(vars(link)) for link in links}
        self._mappings = [
            (mapping, list(mapping.values()) if id(mapping) in changed else seen)
            for mapping, seen in self._mappings
        ]

    def _is_as_before(self, optimizer: Any) -> bool:
        return (
            optimizer is self._optimizer
            and all(
                len(mapping) == len(seen) and all(map(is_, mapping.values(), seen))
                for mapping, seen in self._mappings
            )
            and all(
                len(each) == len(seen) and all(map(is_, each, seen)) for each, seen in self._lists
            )
            and all(
                parameter._data[0] is array and parameter.update_rule is rule
                for parameter, array, rule in self._parameters
            )
            and all(all(map(is_, _of_rule(rule), seen)) for rule, seen in self._rules)
            and all(len(own) == n for own, n in self._own)
        )

    def _note(self, optimizer: Any, of_optimizer: Hashable) -> None:
        self._optimizer, self._of_optimizer = optimizer, of_optimizer
        links = list(optimizer.target.links())
        parameters = list(optimizer.target.params())
        rules = [each.update_rule for each in parameters if each.update_rule is not None]
        mappings = [vars(chainer.global_config), vars(chainer.config._local), *map(vars, links)]
        for owner in (optimizer, *rules):
            for timing in ("pre", "post"):
                hooks = _hooks_at(owner, timing)
                mappings += [hooks, *[vars(hook) for hook in hooks.values() if _has_vars(hook)]]
        mappings += [rule._state for rule in rules if rule._state]
        self._mappings = [(mapping, list(mapping.values())) for mapping in mappings if mapping]
        # A chain notes its links as attributes, a list of links does not.
        lists = [getattr(link, "_children", None) for link in links]
        self._lists = [(each, list(each)) for each in lists if isinstance(each, list)]
        self._rules = [(vars(rule), _of_rule(vars(rule))) for rule in rules]
        self._own = [(own := vars(rule.hyperparam), len(own)) for rule in rules]
        self._parameters = [(each, each._data[0], each.update_rule) for each in parameters]


_of_rule = itemgetter("enabled", "hyperparam", "_state", "_fp32_param")


def _settings(optimizer: Any) -> Iterator[Hashable]:
    """Yield what graphs depend on besides arrays and the optimizer's own attributes."""
    config = {**vars(chainer.global_config), **vars(chainer.config._local)}
    yield from ((name, _hashable(value)) for name, value in config.items())
    yield from _hooks(optimizer)
    for parameter in optimizer.target.params():
        if (rule := parameter.update_rule) is not None:
            yield type(rule), rule.enabled, *_switches(rule.hyperparam), *_hooks(rule)
    for link in optimizer.target.links():
        yield from _plain(vars(link))


def why_not_now() -> str | None:
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


def _places(optimizer: Any) -> Iterator[Any]:
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
    """Return names for the arrays of `Circumstances`, for messages."""
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


def _has_vars(value: Any) -> bool:
    return hasattr(value, "__dict__")


def _hooks(owner: Any) -> Iterator[Any]:
    for timing in ("pre", "post"):
        for name, hook in _hooks_at(owner, timing).items():
            # The rate of weight decay is data.
            rate = {"rate"} if type(hook).__name__ == "WeightDecay" else set()
            yield timing, name, type(hook), *_plain(getattr(hook, "__dict__", {}), without=rate)


def _hooks_at(owner: Any, timing: str) -> Mapping[str, Any]:
    hookable = owner._hookable
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


def _switches(hyperparam: Any) -> Iterator[Hashable]:
    """Yield hyperparameters that are no numbers, such as amsgrad; numbers are data."""
    for item in vars(hyperparam).items():
        if isinstance(item[1], bool):
            yield item


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
