"""Pickle calls and results, including functions and classes that are not in a module."""

from __future__ import annotations

import io
import marshal
import sys
import threading
from collections.abc import Callable, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle

# All threads share cloudpickle's list of modules, and pickling one value may pickle another.
_registry = threading.RLock()


def dump_call(function: Callable[..., Any], arguments: Sequence[Any]) -> bytes:
    """Pickle a function and its arguments.

    Raises
    ------
    TypeError
        If one of them cannot be pickled. The message says which.
    """
    try:
        return dumps((function, arguments))
    except Exception as error:
        shown = getattr(function, "__qualname__", repr(function))
        parts = {f"the function {shown}": function}
        parts |= {f"argument {number} of {shown}": it for number, it in enumerate(arguments, 1)}
        wrong = next((name for name, part in parts.items() if not _can_be_pickled(part)), shown)
        raise TypeError(
            f"{wrong} cannot be pickled, so it cannot be sent to the ranks: {error}. "
            "Create files, connections, locks and communicators inside the function instead"
        ) from error


def dumps(value: object) -> bytes:
    """Pickle a value with cloudpickle.

    Functions and classes from ``__main__``, and from modules that a new Python would not find, are
    pickled with their code. Among such modules are those that pytest imports in its ``importlib``
    mode.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    with _registry:
        try:
            pickler.dump(value)
        finally:
            for module in pickler.registered:
                cloudpickle.unregister_pickle_by_value(module)
    return file.getvalue()


class _Pickler(cloudpickle.Pickler):
    """Pickles by value the objects of modules that a new Python would not find."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.registered: list[ModuleType] = []
        self._seen: set[str] = set()

    def reducer_override(self, obj: Any) -> Any:
        """Register the object's module with cloudpickle if needed, and keep the names of files."""
        if isinstance(obj, CodeType):  # without file names, tracebacks would show no source
            return marshal.loads, (marshal.dumps(obj),)
        if isinstance(obj, (FunctionType, type)):
            name = obj.__module__
            if name in sys.modules and name not in self._seen:
                self._seen.add(name)
                if not (_is_found(name) or name in cloudpickle.list_registry_pickle_by_value()):
                    self.registered.append(sys.modules[name])
                    cloudpickle.register_pickle_by_value(sys.modules[name])
        return super().reducer_override(obj)


def _is_found(name: str) -> bool:
    """Tell whether a new Python with the same search path would find a module."""
    parts, path = name.split("."), None
    if parts[0] in sys.stdlib_module_names:  # collections.abc has no file from Python 3.13 on
        return True
    for end in range(1, len(parts) + 1):
        inner = ".".join(parts[:end])
        found = (finder.find_spec(inner, path) for finder in sys.meta_path)
        spec = next(filter(None, found), None)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    return True


def _can_be_pickled(value: object) -> bool:
    try:
        dumps(value)
    except Exception:
        return False
    return True
