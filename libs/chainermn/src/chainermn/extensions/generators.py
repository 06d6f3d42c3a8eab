"""Save and restore the random generators of a rank: the global ones, and those of its data."""

from __future__ import annotations

import functools
import inspect
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Generator: TypeAlias = np.random.RandomState | np.random.Generator | random.Random
State: TypeAlias = NDArray[np.uint8]

_OPAQUE = (type, ModuleType)
_LIBRARIES = {"builtins", "chainer", "chainermn", "collections", "cupy", "numpy", "threading"}
_DEEPEST = 8  # attributes of attributes, in which generators are found
_MOST = 32  # longer lists are data


def states(owners: Mapping[str, object]) -> dict[str, State]:
    """Return the states of NumPy's and Python's global generators, and of those of objects.

    Parameters
    ----------
    owners : mapping of str to object
        Objects, such as data sets, by any name.

    Returns
    -------
    dict of str to array of uint8
        For each generator, by its place, its state as JSON.
    """
    return {
        place: np.frombuffer(json.dumps(_get(one), default=_plain).encode(), np.uint8)
        for place, one in _found(owners).items()
    }


def restore(owners: Mapping[str, object], saved: Mapping[str, State]) -> None:
    """Restore what `states` returned. Generators that were not there then are left alone."""
    for place, one in _found(owners).items():
        if place in saved:
            _set(one, json.loads(saved[place].tobytes()))


def generators_of(owner: object) -> list[str]:
    """Return the places of the generators that an object has, such as ``"noise.rng"``.

    Attributes, functions with the names that they refer to, and what these have in turn are
    looked through, but not data.
    """
    return [place for place, _ in _walk(owner)]


def is_seeded() -> bool:
    """Tell whether NumPy's global generator was seeded."""
    # Seeding it with a number forgets the entropy from the system.
    # NumPy's types leave this function out.
    return np.random.get_bit_generator().seed_seq is None  # type: ignore[attr-defined]


def _found(owners: Mapping[str, object]) -> dict[str, Any]:
    """Return generators by place."""
    found = dict(_global_ones())
    for name, owner in owners.items():
        found |= {f"{name}.{place}": one for place, one in _walk(owner)}
    return found


def _global_ones() -> dict[str, Any]:
    """Return the generators whose methods are the functions of the modules."""
    functions: dict[str, Any] = {"numpy": np.random.rand, "python": random.random}
    return {name: function.__self__ for name, function in functions.items()}


def _get(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state(legacy=False)


def _set(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        version, numbers, gauss = state
        generator.setstate((version, tuple(numbers), gauss))
    else:
        generator.set_state(state)


def _plain(value: Any) -> Any:
    return value.tolist()  # arrays and numbers of NumPy


def _walk(
    value: Any, place: str = "", seen: set[int] | None = None, depth: int = 0
) -> Iterator[tuple[str, Generator]]:
    if seen is None:  # samplers refer to the global ones
        seen = {id(generator) for generator in _global_ones().values()}
    is_generator = isinstance(value, (np.random.RandomState, np.random.Generator, random.Random))
    # The numbers of a SystemRandom cannot be repeated.
    if id(value) in seen or depth > _DEEPEST or isinstance(value, (*_OPAQUE, random.SystemRandom)):
        return
    seen.add(id(value))
    if is_generator:
        yield place or "itself", value
        return
    for name, inner in _inside(value):
        yield from _walk(inner, f"{place}.{name}".lstrip("."), seen, depth + 1)


def _inside(value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, FunctionType):
        names = value.__globals__
        used = {name: names[name] for name in _names_in(value.__code__) if name in names}
        return [*inspect.getclosurevars(value).nonlocals.items(), *sorted(used.items())]
    if isinstance(value, MethodType):
        return [("self", value.__self__), ("function", value.__func__)]
    if isinstance(value, functools.partial):
        return _inside([value.func, *value.args, *value.keywords.values()])
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value)) if len(value) <= _MOST else {}
    if isinstance(value, dict):
        return [(str(key), one) for key, one in value.items()] if len(value) <= _MOST else []
    attributes = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:  # what the user's classes have, and what their methods use
        if kind.__module__.partition(".")[0] not in _LIBRARIES:
            attributes = {**vars(kind), **attributes}
    return list(attributes.items())


def _names_in(code: CodeType) -> set[str]:
    inner = (_names_in(one) for one in code.co_consts if isinstance(one, CodeType))
    return set(code.co_names).union(*inner)
