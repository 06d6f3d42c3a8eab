"""The parts of a replica: all that a rank needs to go on training as the others do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import chainer
import numpy as np

from chainermn.gradients import persistents
from chainermn.gradients.parameters import named_parameters
from chainermn.optimizers.fingerprints import fingerprints

if TYPE_CHECKING:
    from chainer.optimizer import UpdateRule


class Part(NamedTuple):
    """One of the values that make up a replica.

    Attributes
    ----------
    name : str
        Name for messages.
    value : object
        Its value; an array is the replica's own, not a copy.
    assign : callable
        Function that gives the replica another value.
    """

    name: str
    value: Any
    assign: Callable[[Any], None]


def parameters_of(model: chainer.Link) -> list[Part]:
    """Return the initialized parameters, sorted by name, each once."""
    once = {p.node: (name, p) for name, p in reversed(named_parameters(model))}
    return [
        Part(name, p.array, partial(_fill, p.array))
        for name, p in sorted(once.values(), key=lambda pair: pair[0])
        if p.array is not None
    ]


def states_of(optimizer: chainer.Optimizer) -> list[Part]:
    """Return the states of the update rules, and the numbers of steps and epochs.

    The states that Chainer has not initialized yet are left out.
    """
    found = [_attribute(optimizer, name) for name in ("t", "epoch")]
    rules: dict[int, tuple[str, UpdateRule]] = {}
    for name, parameter in named_parameters(optimizer.target):
        rule = getattr(parameter, "update_rule", None)
        if rule is not None:
            rules.setdefault(id(rule), (name, rule))
    for name, rule in rules.values():
        found.append(_attribute(rule, "t", f"t of {name}"))
        for key, value in sorted((rule.state or {}).items()):
            is_array = isinstance(value, chainer.get_array_types())
            assign = partial(_fill, value) if is_array else partial(rule.state.__setitem__, key)
            found.append(Part(f"{key} of {name}", value, assign))
    return found


def persistents_of(model: chainer.Link, *, following_only: bool = False) -> list[Part]:
    """Return the persistent values; optionally only those that should be equal on all ranks."""
    return [
        Part(each.path, each.value, each.set)
        for each in persistents.persistents_of(model)
        if each.follows_rank_0 or not following_only
    ]


def is_float_array(value: Any) -> bool:
    """Tell whether a value can be averaged."""
    return isinstance(value, chainer.get_array_types()) and value.dtype.kind == "f"


def _attribute(owner: Any, name: str, shown: str = "") -> Part:
    return Part(shown or name, getattr(owner, name), partial(setattr, owner, name))


def values_of(parts: Iterable[Part]) -> dict[str, Any]:
    """Return the values of parts by their names."""
    return {part.name: part.value for part in parts}


def describe(values: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return the shape, dtype and fingerprint of each value: equal on ranks with equal values."""
    found = zip(values.items(), fingerprints(list(values.values())), strict=True)
    return {
        name: (
            getattr(value, "shape", None),
            getattr(getattr(value, "dtype", None), "str", ""),
            fingerprint,
        )
        for (name, value), fingerprint in found
    }


def initialize_states(model: chainer.Link) -> None:
    """Initialize the states of update rules, so that all replicas have the same parts.

    Chainer cannot load a snapshot without them, either.
    """
    for parameter in model.params():
        rule = getattr(parameter, "update_rule", None)
        if rule is None or parameter.array is None:
            continue
        if rule._use_fp32_update and parameter.dtype == np.float16:
            parameter = chainer.Parameter(parameter.array.astype(np.float32))
        rule._init_states(parameter)


def _fill(array: Any, value: Any) -> None:
    """Copy the elements of an array, from the memory of the host or of a GPU."""
    array[...] = chainer.backend.get_device_from_array(array).send(value)
