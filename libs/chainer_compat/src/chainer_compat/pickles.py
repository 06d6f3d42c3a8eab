"""Read the pickles of object arrays without running them.

Unpickling calls whatever functions a pickle names. NumPy stores an array of Python objects as a
pickle, and Chainer stores None as such an array. This module interprets only the few instructions
that make up an array of plain values, and never looks up or calls anything that a pickle names.
"""

from __future__ import annotations

import math
import pickletools
import re
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import NDArray

PLAIN = (type(None), bool, int, float, complex, str, bytes, numpy.generic)

_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS = re.compile(
    r"BININT[12]?|LONG[14]|BINFLOAT|(SHORT_)?BIN(UNICODE|BYTES|STRING)|BIN(UNICODE|BYTES)8"
)
_LONGEST_NAME = 100
_MOST_AXES = 64  # as in NumPy
_SCALAR_TYPE = re.compile(r"[biufcSU][0-9]{1,7}")


class NotPlainError(Exception):
    """Raised if a pickle is anything other than an array of None, numbers and strings."""


def read_array(pickle: bytes) -> NDArray[Any]:
    """Return the array of objects in a pickle from NumPy, with protocol 2 or later.

    Raises
    ------
    NotPlainError
        If it is not an array, or holds anything other than None, numbers and strings.
    Exception
        If it is not a pickle.
    """
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    argument: Any
    n_made, is_built = 0, False
    for code, argument, _ in pickletools.genops(pickle):
        match code.name:
            case "PROTO" | "FRAME" | "STOP":
                pass
            case name if name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            case name if _LITERALS.fullmatch(name):
                stack.append(argument)
            case "GLOBAL":
                stack.append(_Name.of(*argument.split(" ")))
            case "STACK_GLOBAL":
                stack[-2:] = [_Name.of(*stack[-2:])]
            case "MARK":
                stack.append(_MARK)
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE1" | "TUPLE2" | "TUPLE3" as name:
                length = int(name[-1])
                stack[-length:] = [tuple(stack[-length:])]
            case "TUPLE":
                stack.append(tuple(_pop_to_mark(stack)))
            case "EMPTY_LIST":
                stack.append([])
            case "APPEND":
                item = stack.pop()
                _last_list(stack).append(item)
            case "APPENDS":
                items = _pop_to_mark(stack)
                _last_list(stack).extend(items)
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "REDUCE":
                arguments = stack.pop()
                stack[-1] = made = _call(stack[-1], arguments)
                n_made += len(made) if isinstance(made, (bytes, str)) else 0
                if n_made > len(pickle):  # the same text many times
                    raise NotPlainError(f"{n_made} characters in {len(pickle)} bytes")
            case "BUILD":
                state = stack.pop()
                stack[-1] = made = _build(stack[-1], state)
                if isinstance(made, numpy.ndarray) and is_built:
                    raise NotPlainError("a second array")
                is_built |= isinstance(made, numpy.ndarray)
            case name:
                raise NotPlainError(f"the instruction {name}")
    (array,) = stack
    if not isinstance(array, numpy.ndarray):
        raise NotPlainError(_kind(array))
    return array


_MARK = object()


@dataclass(frozen=True)
class _Name:
    """A module and name that a pickle asks for."""

    text: str

    @classmethod
    def of(cls, module: object, name: object) -> _Name:
        for part in (module, name):
            if not isinstance(part, str) or len(part) > _LONGEST_NAME:
                raise NotPlainError(f"no name of at most {_LONGEST_NAME} characters")
        # NumPy 2 renamed a module of NumPy 1.
        return cls(f"{module}.{name}".replace("numpy.core.", "numpy._core."))


class _NewArray:
    """An array whose content is not known yet."""


@dataclass
class _Type:
    """A NumPy dtype, whose byte order comes later."""

    text: str
    byte_order: str = "="

    def scalar(self, content: bytes) -> Any:
        if not _SCALAR_TYPE.fullmatch(self.text) or self.byte_order not in ("<", ">", "|", "="):
            raise NotPlainError(f"a number of type {self.byte_order + self.text!r}")
        (number,) = numpy.frombuffer(content, self.byte_order + self.text)
        return number


def _call(function: object, arguments: object) -> Any:
    match function, arguments:
        case (
            _Name("numpy._core.multiarray._reconstruct"),
            (_Name("numpy.ndarray"), (0,), b"b" | "b"),
        ):
            return _NewArray()
        case _Name("numpy.dtype"), (str(text), *_):
            return _Type(text)
        case _Name("numpy._core.multiarray.scalar"), (_Type() as dtype, bytes(content)):
            return dtype.scalar(content)
        case _Name("numpy._core.multiarray.scalar"), (_Type() as dtype, str(content)):
            return dtype.scalar(content.encode("latin-1"))  # Python 2 had one type for both
        case _Name("_codecs.encode"), (str(text), "latin1"):  # protocol 2 has no bytes
            return text.encode("latin-1")
        case _Name("builtins.complex" | "__builtin__.complex"), (float(real), float(imaginary)):
            return complex(real, imaginary)
    raise NotPlainError(f"a call of {_kind(function)}")


def _build(what: object, state: object) -> Any:
    match what, state:
        case _NewArray(), (int(), tuple(shape), _Type("O" | "O4" | "O8"), bool(), list(items)):
            return _array(shape, items)
        case _Type() as dtype, (int(), str(byte_order), *_):
            dtype.byte_order = byte_order
            return dtype
    raise NotPlainError(f"an object made of {_kind(what)}")


def _array(shape: tuple[Any, ...], items: list[Any]) -> NDArray[Any]:
    for item in items:
        if not isinstance(item, PLAIN):
            raise NotPlainError(_kind(item))
    # The product of many large numbers would take forever.
    is_possible = all(isinstance(n, int) and 0 <= n < 2**63 for n in shape)
    if not is_possible or len(shape) > _MOST_AXES or math.prod(shape) != len(items):
        raise NotPlainError(f"{len(items)} objects in an array of another shape")
    array = numpy.empty(len(items), object)
    array[:] = items
    return array.reshape(shape)


def _pop_to_mark(stack: list[Any]) -> list[Any]:
    items = []
    while (item := stack.pop()) is not _MARK:
        items.append(item)
    return items[::-1]


def _last_list(stack: list[Any]) -> list[Any]:
    if type(stack[-1]) is not list:
        raise NotPlainError(_kind(stack[-1]))
    return stack[-1]


def _kind(what: object) -> str:
    if isinstance(what, _Name):
        return ascii(what.text)[1:-1]
    return f"a value of type {type(what).__name__.strip('_').lower()}"
