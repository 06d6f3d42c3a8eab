"""The parts of a replica: the values, by their names, that must be the same on all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import chainer

from chainermn.gradients.parameters import named_parameters
from chainermn.optimizers.fingerprints import fingerprints

_COMPARABLE = bool, int, float, complex, str, bytes, type(None)


def parameters_of(model: chainer.Link) -> dict[str, Any]:
    """Return the arrays of the initialized parameters, each once, by the first of its names."""
    once = {p.node: (name, p.array) for name, p in reversed(named_parameters(model))}
    return {name: array for name, array in sorted(once.values()) if array is not None}


def states_of(optimizer: chainer.Optimizer) -> dict[str, Any]:
    """Return what a snapshot holds of an optimizer: numbers of steps, and states of its rules."""
    values: dict[str, Any] = {}
    optimizer.serialize(_Collector(values))
    return values


def is_float_array(value: Any) -> bool:
    """Tell whether a value is an array of floats."""
    return isinstance(value, chainer.get_array_types()) and value.dtype.kind == "f"


def describe(values: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return the shape, dtype and fingerprint of each value: equal on ranks with equal values.

    Objects that are neither numbers, texts nor arrays are left out.
    """
    known = {
        name: value.item() if getattr(value, "shape", None) == () else value
        for name, value in values.items()
        if isinstance(value, _COMPARABLE) or hasattr(value, "dtype")
    }
    found = zip(known.items(), fingerprints(list(known.values())), strict=True)
    return {
        name: (
            getattr(value, "shape", None),
            getattr(getattr(value, "dtype", None), "str", ""),
            fingerprint,
        )
        for (name, value), fingerprint in found
    }


def digest_of(values: Mapping[str, Any]) -> bytes:
    """Return a few bytes that are equal on ranks with equal values under the same names."""
    return hashlib.blake2b(repr(describe(values)).encode(), digest_size=16).digest()


class _Collector(chainer.Serializer):
    """Collects what would be saved, as it is and where it lies."""

    def __init__(self, values: dict[str, Any], path: str = "") -> None:
        self._values, self._path = values, path

    def __getitem__(self, key: str) -> _Collector:
        return _Collector(self._values, f"{self._path}{key}")

    def __call__(self, key: str, value: Any) -> Any:
        self._values[f"{key} of {self._path}" if self._path else key] = value
        return value
