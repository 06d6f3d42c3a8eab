"""Tools with which repairs change modules."""

import builtins
import functools
from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def replaces(owner: Any, name: str) -> Callable[[Function], Function]:
    """Return a decorator: the function takes the place, name and docstring of the owner's own."""

    def replace(function: Function) -> Function:
        setattr(owner, name, functools.wraps(getattr(owner, name))(function))
        return function

    return replace


def view(module: ModuleType, **replaced: object) -> ModuleType:
    """Return a copy of a module's namespace with some names replaced."""
    copy = ModuleType(module.__name__, module.__doc__)
    vars(copy).update(vars(module), **replaced)
    return copy


def substitute_imports(module: ModuleType, substitutes: Mapping[str, ModuleType]) -> None:
    """Make the import statements of a module that has not run yet import other modules.

    Unlike an entry in ``sys.modules``, this does not affect other modules or threads.

    Parameters
    ----------
    module
        Module that is about to run.
    substitutes
        Modules that ``import name`` gives, by absolute name.
    """
    original = builtins.__import__

    def import_(name: str, *args: Any, **kwargs: Any) -> ModuleType:
        substitute = substitutes.get(name)
        return original(name, *args, **kwargs) if substitute is None else substitute

    vars(module)["__builtins__"] = {**vars(builtins), "__import__": import_}


def with_globals(function: Callable[..., Any], **replaced: object) -> FunctionType:
    """Return a copy of a function in which some global names refer to other objects."""
    assert isinstance(function, FunctionType)
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, **replaced},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__qualname__ = function.__qualname__
    copy.__doc__ = function.__doc__
    return copy


def rename(function: Callable[..., Any], old: str, new: str) -> None:
    """Replace a global or attribute name that a function uses.

    Raises
    ------
    LookupError
        If the function does not use the old name.
    """
    assert isinstance(function, FunctionType)
    names = function.__code__.co_names
    if old not in names:
        raise LookupError(f"{function.__qualname__} was expected to use the name {old!r}")
    function.__code__ = function.__code__.replace(
        co_names=tuple(new if name == old else name for name in names)
    )


def replace_text(function: Callable[..., Any], old: str, new: str) -> None:
    """Replace a fragment of a function's string constants, such as a CUDA kernel's source.

    Raises
    ------
    LookupError
        If no string constant of the function contains the old fragment.
    """
    assert isinstance(function, FunctionType)
    constants = function.__code__.co_consts
    if not any(isinstance(constant, str) and old in constant for constant in constants):
        raise LookupError(f"{function.__qualname__} was expected to contain the text {old!r}")
    function.__code__ = function.__code__.replace(
        co_consts=tuple(
            constant.replace(old, new) if isinstance(constant, str) else constant
            for constant in constants
        )
    )
