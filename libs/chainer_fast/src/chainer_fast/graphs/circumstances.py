"""What must stay as it was for a graph to do the same as the script's own code.

A graph repeats kernels, not Python code. So what that code reads is compared before each launch:
settings of Chainer and of the optimizer, and attributes of links.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from operator import is_, itemgetter
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import chainer
import numpy as np

from chainer_fast.graphs.inputs import NotRecordable

_NUMBERS = (int, float, complex, bool, str, bytes, type(None), np.generic, np.dtype)
_LIBRARIES = {
    "builtins",
    "chainer",
    "chainermn",
    "cupy",
    "functools",
    "logging",
    "numpy",
    "random",
}
# Longer containers are data.
_MOST = 64
# Most combinations of settings to remember.
_MOST_SETTINGS = 64
# Attributes of an optimizer that change in each step, and that a recorded step reads on the GPU.
_OF_STEPS = {
    "t",
    "epoch",
    "hyperparam",
    "target",
    "_ahead",
    "_cuda_graphs",
    "_hookable",
    "_loss_scale",
    "_loss_scaling_isnan",
    "_loss_scaling_isnan_ever",
}
_METHODS = (
    "update",
    "call_hook",
    "call_hooks",
    "check_nan_in_grads",
    "is_safe_to_update",
    "reallocate_cleared_grads",
    "update_loss_scale",
)
#: An attribute of a link, by its name.
Attribute = tuple[Any, str]


class ById:
    """An object that is equal only to itself, and that is kept, so that no other gets its id."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and other.value is self.value


class Description:
    """Describes values, so that equal descriptions mean that code does the same with them.

    Attributes
    ----------
    mappings, lists
        What was looked into: attributes of objects, and lists.
    links : list of chainer.Link
        Links that were found.
    """

    def __init__(self) -> None:
        self.mappings: list[Mapping[str, Any]] = []
        self.lists: list[list[Any]] = []
        self.links: list[chainer.Link] = []

    def of(self, value: Any, depth: int = 2) -> Hashable:
        """Return the description of a value."""
        if isinstance(value, _NUMBERS):
            return type(value), repr(value) if isinstance(value, (float, np.generic)) else value
        if isinstance(value, chainer.Link):
            self.links.append(value)
            return ById(value)
        if isinstance(value, (tuple, list, dict)):
            return self._of_container(value, depth)
        if isinstance(value, MethodType) and depth:
            return "method", self.of(value.__func__, depth), self.of(value.__self__, depth - 1)
        if isinstance(value, FunctionType) and depth:
            return self._of_function(value, depth - 1)
        # What libraries keep in their objects is theirs.
        is_opaque = isinstance(value, (type, ModuleType, BuiltinFunctionType, FunctionType))
        is_opaque |= type(value).__module__.partition(".")[0] in _LIBRARIES
        if is_opaque or not depth or not hasattr(value, "__dict__"):
            return ById(value)
        self.mappings.append(vars(value))
        inside = (self._of_attribute(*item) for item in vars(value).items())
        return ById(value), *inside

    def _of_attribute(self, name: str, value: Any) -> Hashable:
        return name, self.of(value, 0) if isinstance(value, _NUMBERS) else ById(value)

    def _of_container(self, value: Any, depth: int) -> Hashable:
        if isinstance(value, list):
            self.lists.append(value)
        if isinstance(value, dict):
            self.mappings.append(value)
        if len(value) > _MOST or not depth:
            return ById(value), len(value)
        items = value
        if isinstance(value, dict):
            items = [each for item in value.items() for each in item]
        return type(value), *[self.of(each, depth - 1) for each in items]

    def _of_function(self, function: FunctionType, depth: int) -> Hashable:
        code, names = function.__code__, function.__globals__
        inside = closed_over(function)
        inside += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        inside += [names[name] for name in code.co_names if name in names]
        return code, *[self.of(each, depth) for each in inside]


def of_loss_function(function: Any) -> tuple[Hashable, list[chainer.Link]]:
    """Return what identifies a loss function, and the links that it refers to.

    Functions that the same line makes again are equal.

    Raises
    ------
    NotRecordable
        If it refers to arrays, which a script may replace.
    """
    description = Description()
    found = description.of(function)
    seen = [*description.lists, *[list(each.values()) for each in description.mappings]]
    cells = closed_over(function)
    arrays = chainer.get_array_types()
    if any(isinstance(each, arrays) for values in [*seen, cells] for each in values):
        raise NotRecordable(
            "the loss function uses arrays from outside: pass them as arguments of update()"
        )
    return found, description.links


def closed_over(function: Any) -> list[Any]:
    """Return what a function or method has from the functions around it; None if not assigned."""
    found = []
    for cell in getattr(getattr(function, "__func__", function), "__closure__", None) or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:
            found.append(None)
    return found


class Circumstances:
    """What graphs of an optimizer depend on, besides arguments.

    Looking at everything takes long. So a look first finds out whether anything was assigned since
    the last one.

    Attributes
    ----------
    arrays : dict of str to array
        All arrays that steps write in place, by name: parameters, their states, persistent values.
    links : list of chainer.Link
        Links of the optimizer's target, and those that the loss function uses besides.
    number : int
        Number of the current settings: the same again if they are.
    results : set
        Attributes of links that steps replace by arrays, as pairs of the link's id and a name.
    why_not : str or None
        What prevents graphs for good.
    """

    def __init__(self) -> None:
        self.arrays: dict[str, Any] = {}
        self.links: list[chainer.Link] = []
        self.number = 0
        self.results: set[tuple[int, str]] = set()
        self.why_not: str | None = None
        self._numbers: dict[Hashable, int] = {}
        self._next_number = itertools.count()
        self._seen: tuple[Any, ...] = ()
        self._mappings: list[tuple[Mapping[str, Any], list[Any]]] = []
        self._positions: dict[int, int] = {}
        self._lists: list[tuple[list[Any], list[Any]]] = []
        self._rules: list[tuple[Mapping[str, Any], tuple[Any, ...]]] = []
        self._parameters: list[tuple[Any, Any, Any]] = []
        #: Hyperparameters of single parameters, and how many there are.
        self._own: list[Mapping[str, Any]] = []
        self._n_own = 0
        #: Mappings for hooks that have none.
        self._empty: list[Mapping[str, Any]] = []

    def look(self, optimizer: Any, others: Sequence[chainer.Link]) -> bool:
        """Look at everything; return whether the arrays are those of the last look.

        Parameters
        ----------
        optimizer
            The optimizer.
        others
            Links that the loss function uses; they may be parts of the target.
        """
        own = vars(optimizer)
        seen = (
            ById(optimizer),
            ById(optimizer.target),
            *[ById(link) for link in others],
            *[item for item in own.items() if item[0] not in _OF_STEPS and _is_number(item[1])],
            own.get("_loss_scale") is None,
            *_switches(optimizer.hyperparam),
        )
        if seen == self._seen and self._is_as_before():
            return True
        self._seen = seen
        self.links = _unique([optimizer.target, *others])
        before, self.arrays = self.arrays, dict(_places(optimizer, self.links))
        self.why_not = why_not(optimizer)
        self._mappings.clear()
        key = seen, *self._settings(optimizer)
        if len(self._numbers) > _MOST_SETTINGS:
            self._numbers.clear()
        self.number = self._numbers.setdefault(key, next(self._next_number))
        self._note(optimizer)
        return before.keys() == self.arrays.keys() and all(
            map(is_, before.values(), self.arrays.values())
        )

    def note_results(self, attributes: Iterable[Attribute]) -> None:
        """Take it as seen that links have got results of a step as attributes."""
        for link in {id(link): link for link, _ in attributes}.values():
            position = self._positions[id(link)]
            self._mappings[position] = vars(link), list(vars(link).values())

    def _is_as_before(self) -> bool:
        return (
            all(
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
            and sum(map(len, self._own)) == self._n_own
            and not any(self._empty)
        )

    def _settings(self, optimizer: Any) -> Iterator[Hashable]:
        """Yield what graphs depend on besides arrays and the optimizer's own attributes."""
        description = Description()
        for config in (vars(chainer.global_config), vars(chainer.config._local)):
            yield from ((name, description.of(value, 0)) for name, value in config.items())
        yield from _hooks(optimizer)
        for parameter in optimizer.target.params():
            if (rule := parameter.update_rule) is not None:
                yield ById(rule), ById(rule.hyperparam), rule.enabled, rule._use_fp32_update
                yield from _switches(rule.hyperparam)
                yield from _hooks(rule)
        for link in self.links:
            yield ById(link), type(link)
            persistent = link._persistent
            for name, value in vars(link).items():
                if (id(link), name) in self.results or name in persistent:
                    continue
                if not isinstance(value, (chainer.Parameter, chainer.Link, set)):
                    yield name, description.of(value)
        mappings = [*map(vars, self.links), *description.mappings]
        self._positions = {id(link): k for k, link in enumerate(self.links)}
        self._mappings = [(each, list(each.values())) for each in mappings]
        self._lists = [(each, list(each)) for each in description.lists]

    def _note(self, optimizer: Any) -> None:
        parameters = list(optimizer.target.params())
        rules = [each.update_rule for each in parameters if each.update_rule is not None]
        mappings = [vars(chainer.global_config), vars(chainer.config._local)]
        self._empty = []
        for owner in (optimizer, *rules):
            for timing in ("pre", "post"):
                if hooks := _hooks_at(owner, timing):
                    mappings += [hooks, *map(_vars, hooks.values())]
                else:
                    self._empty.append(hooks)
        mappings += [rule._state for rule in rules if rule._state is not None]
        self._mappings += [(mapping, list(mapping.values())) for mapping in mappings]
        self._rules = [(vars(rule), _of_rule(vars(rule))) for rule in rules]
        self._own = [vars(rule.hyperparam) for rule in rules]
        self._n_own = sum(map(len, self._own))
        self._parameters = [(each, each._data[0], each.update_rule) for each in parameters]


_of_rule = itemgetter("enabled", "hyperparam", "_state", "_fp32_param", "_use_fp32_update")


def why_not(optimizer: Any) -> str | None:
    """Return what prevents graphs for good, or None."""
    kind = type(optimizer)
    for name in _METHODS:
        if getattr(kind, name) is not getattr(chainer.GradientMethod, name):
            return f"{kind.__name__} has a method {name!r} of its own"
    rules = [parameter.update_rule for parameter in optimizer.target.params()]
    for owner in (optimizer, *filter(None, rules)):
        for timing in ("pre", "post"):
            for name, hook in _hooks_at(owner, timing).items():
                if not type(hook).__module__.startswith(("chainer.", "chainermn.")):
                    return f"the hook {name!r} is the script's own code"
    return None


def is_looked_at() -> bool:
    """Return whether debug mode, or a hook of functions or links, looks at each step now."""
    hooks = chainer.get_function_hooks() or chainer._get_link_hooks()
    return bool(chainer.is_debug() or hooks)


def pre_hooks(optimizer: Any) -> list[Any]:
    """Return the hooks that run before the update."""
    return list(_hooks_at(optimizer, "pre").values())


def persistent_arrays(
    target: chainer.Link, links: Iterable[chainer.Link]
) -> Iterator[tuple[str, Any]]:
    """Yield the persistent values of links that are arrays in GPU memory, with names."""
    paths = {id(link): path.rstrip("/") for path, link in target.namedlinks()}
    for k, link in enumerate(links):
        path = paths.get(id(link), f"link {k} of the loss function: ")
        for name in sorted(link._persistent):
            if isinstance(value := getattr(link, name, None), chainer.backends.cuda.ndarray):
                yield f"{path}/{name}", value


def rule_values(optimizer: Any) -> list[Any]:
    """Return the plain attributes of update rules, which only eager steps change."""
    rules = [parameter.update_rule for parameter in optimizer.target.params()]
    return [
        {key: v for key, v in vars(rule).items() if isinstance(v, _NUMBERS) and key != "t"}
        for rule in rules
        if rule is not None
    ]


def _places(optimizer: Any, links: Sequence[chainer.Link]) -> Iterator[tuple[str, Any]]:
    for name, parameter in optimizer.target.namedparams():
        if (array := parameter.array) is not None:
            yield name, array
        if (rule := parameter.update_rule) is not None:
            yield from ((f"{key} of {name}", each) for key, each in (rule.state or {}).items())
            if (array := getattr(rule._fp32_param, "array", None)) is not None:
                yield f"the float32 copy of {name}", array
    yield from persistent_arrays(optimizer.target, links)


def _unique(roots: Iterable[chainer.Link]) -> list[chainer.Link]:
    return list({id(link): link for root in roots for link in root.links()}.values())


def _is_number(value: Any) -> bool:
    return isinstance(value, _NUMBERS)


def _vars(value: Any) -> Mapping[str, Any]:
    return getattr(value, "__dict__", {})


def _hooks(owner: Any) -> Iterator[Hashable]:
    for timing in ("pre", "post"):
        for name, hook in _hooks_at(owner, timing).items():
            # The rate of weight decay is data.
            data = {"rate"} if type(hook).__name__ == "WeightDecay" else set()
            description = Description()
            inside = [
                (key, description.of(value, 0))
                for key, value in _vars(hook).items()
                if key not in data
            ]
            yield timing, name, ById(hook), *inside


def _hooks_at(owner: Any, timing: str) -> Mapping[str, Any]:
    hookable = owner._hookable
    found: Mapping[str, Any] = getattr(hookable, f"_{timing}_update_hooks")
    return found


def _switches(hyperparam: Any) -> Iterator[Hashable]:
    """Yield hyperparameters that choose a kernel, such as amsgrad; numbers are data."""
    for name, value in vars(hyperparam).items():
        if isinstance(value, (bool, str, type(None))):
            yield name, value
