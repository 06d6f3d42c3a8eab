"""Read pickles without running them.

Unpickling calls whatever functions a pickle names. Here, a call becomes a record of the name and
of the arguments, so a pickle can only describe data; nothing that it names is looked up.
"""

from __future__ import annotations

import math
import pickletools
import re
from dataclasses import dataclass, field
from typing import IO, Any

import numpy
from numpy.typing import NDArray

_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS = re.compile(
    r"BININT[12]?|LONG[14]|BINFLOAT|(SHORT_)?BIN(UNICODE|BYTES|STRING)|BIN(UNICODE|BYTES)8"
    r"|BYTEARRAY8"
)
_EMPTY = {"EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": dict}
_MARK = object()
_LONGEST_NAME = 100
_MOST_AXES = 64  # as in NumPy
_MOST_CHARACTERS = 2**20  # of all strings in an array of objects; a pickle can repeat each
_NUMBER_TYPE = re.compile(r"[biufcSU][0-9]{1,7}")


class NotPlainError(ValueError):
    """Raised if a pickle holds anything other than expected; the text says what, as a noun."""


@dataclass(frozen=True)
class Name:
    """A module and a name in it, with a dot between."""

    text: str

    @classmethod
    def of(cls, module: object, name: object) -> Name:
        """Make the name from its parts."""
        for part in (module, name):
            if not isinstance(part, str) or len(part) > _LONGEST_NAME:
                raise NotPlainError(f"no name of at most {_LONGEST_NAME} characters")
        # NumPy 2 renamed a module of NumPy 1.
        return cls(f"{module}.{name}".replace("numpy.core.", "numpy._core."))


@dataclass(eq=False)  # a key must not compare all that a call holds
class Call:
    """A call that unpickling would make, and what it would give to the result.

    An ordered dictionary is a call that gets items.
    """

    function: Name
    arguments: tuple[Any, ...]
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)


@dataclass(eq=False)
class Outside:
    """Something that is not in the pickle itself, such as the numbers of one of PyTorch's."""

    label: Any


ORDERED = Name("collections.OrderedDict")


def read(pickle: bytes | IO[bytes]) -> Any:
    """Return what a pickle of protocol 2 or later describes.

    It consists of None, numbers, strings, bytes, tuples, lists, dictionaries, `Name`, `Call` and
    `Outside`. Strings of Python 2 are decoded as Latin-1. Of an open file, one pickle is read.

    Raises
    ------
    NotPlainError
        If it holds anything else.
    Exception
        If it is not a pickle.
    """
    stack: list[Any] = []
    memo: dict[int, Any] = {}

    def after_mark() -> list[Any]:
        items = []
        while (item := stack.pop()) is not _MARK:
            items.append(item)
        return items[::-1]

    argument: Any
    for code, argument, _ in pickletools.genops(pickle):
        match code.name:
            case "PROTO" | "FRAME" | "STOP":
                pass
            case name if name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            case name if _LITERALS.fullmatch(name):
                stack.append(argument)
            case name if name in _EMPTY:
                stack.append(_EMPTY[name]())
            case "MARK":
                stack.append(_MARK)
            case "TUPLE1" | "TUPLE2" | "TUPLE3" as name:
                length = int(name[-1])
                stack[-length:] = [tuple(stack[-length:])]
            case "TUPLE":
                stack.append(tuple(after_mark()))
            case "APPEND" | "APPENDS" as name:
                items = after_mark() if name == "APPENDS" else [stack.pop()]
                _expect(list, stack[-1]).extend(items)
            case "SETITEM" | "SETITEMS" as name:
                items = after_mark() if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
                # The digest of a tuple may take forever: each of its items may be one.
                keys = [_expect((str, bytes, int, Call), key) for key in items[::2]]
                target = stack[-1]
                if isinstance(target, Call) and target.function == ORDERED:
                    target = target.items
                _expect(dict, target).update(zip(keys, items[1::2], strict=True))
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "GLOBAL":
                stack.append(Name.of(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                stack[-2:] = [Name.of(*stack[-2:])]
            case "BINPERSID":
                stack[-1] = Outside(stack[-1])
            case "REDUCE":
                arguments = _expect(tuple, stack.pop())
                stack[-1] = Call(_expect(Name, stack[-1]), arguments)
            case "BUILD":
                state = stack.pop()
                _expect(Call, stack[-1]).state = state
            case name:
                raise NotPlainError(f"the instruction {name}")
    (found,) = stack
    return found


def array(found: object) -> NDArray[Any]:
    """Return an array of numbers, or of objects that are None, numbers and strings.

    Parameters
    ----------
    found : Call
        What `read` has found, or part of it.

    Raises
    ------
    NotPlainError
        If it is not an array, or one of other objects.
    ValueError, TypeError
        If it contradicts itself.
    """
    match found:
        case Call(
            Name("numpy._core.multiarray._reconstruct"),
            (Name("numpy.ndarray"), *_),
            (int(), tuple(shape), kind, bool(in_columns), values),
        ):
            pass
        case Call(
            Name("numpy._core.numeric._frombuffer"),
            (values, kind, tuple(shape), "C" | "F" as order),
        ):
            in_columns = order == "F"
        case _:
            raise NotPlainError(described(found))
    dtype = _dtype(kind)
    flat: NDArray[Any]
    if dtype.hasobject:
        items = _expect(list, values)
        flat, in_columns = numpy.empty(len(items), object), False
        flat[:] = _plain(items)
    else:
        flat = numpy.frombuffer(content(values), dtype)
    # The product of many large numbers would take forever.
    is_possible = all(isinstance(n, int) and 0 <= n < 2**63 for n in shape)
    if not is_possible or len(shape) > _MOST_AXES or math.prod(shape) != flat.size:
        raise NotPlainError(f"{flat.size} values in an array of another shape")
    return flat.reshape(shape, order="F" if in_columns else "C")


def mapping(found: object) -> dict[Any, Any]:
    """Return the items of a dictionary, ordered or not.

    Raises
    ------
    NotPlainError
        If it is not a dictionary.
    """
    match found:
        case dict():
            return found
        case Call(Name("collections.OrderedDict"), ()):
            return found.items
        case Call(Name("collections.OrderedDict"), ([*pairs],)) if all(
            isinstance(pair, list) and len(pair) == 2 for pair in pairs
        ):  # of Python 2
            return {_expect(str, key): value for key, value in pairs}
    raise NotPlainError(described(found))


def content(found: object) -> bytes:
    """Return what was found as bytes, which Python 2 and protocol 2 do not have.

    Raises
    ------
    NotPlainError
        If it is neither bytes nor a string of Latin-1.
    """
    match found:
        case bytes() | bytearray():
            return bytes(found)
        case str(text) | Call(Name("_codecs.encode"), (str(text), "latin1")):
            return text.encode("latin-1")
    raise NotPlainError(described(found))


def _plain(items: list[Any]) -> list[Any]:
    plain, n_made = [], 0
    for item in items:
        value = item
        match item:
            case Call(Name("numpy._core.multiarray.scalar"), (kind, text)):
                (value,) = numpy.frombuffer(content(text), _dtype(kind))
            case Call(Name("_codecs.encode")):
                value = content(item)
            case Call(Name("builtins.complex" | "__builtin__.complex"), (float(), float())):
                value = complex(*item.arguments)
            case None | bool() | int() | float() | str() | bytes():
                pass
            case _:
                raise NotPlainError(described(item))
        if value is not item and isinstance(value, (bytes, str)):
            n_made += len(value)
            if n_made > _MOST_CHARACTERS:
                raise NotPlainError(f"more than {_MOST_CHARACTERS} characters")
        plain.append(value)
    return plain


def _dtype(found: object) -> numpy.dtype[Any]:
    match found:
        case Call(Name("numpy.dtype"), ("O" | "O4" | "O8", *_)):
            return numpy.dtype(object)
        case Call(Name("numpy.dtype"), (str(kind), *_), (int(), "<" | ">" | "|" as order, *_)) if (
            _NUMBER_TYPE.fullmatch(kind)
        ):
            return numpy.dtype(order + kind)
        case Call(Name("numpy.dtype"), (str(kind), *_)):
            raise NotPlainError(f"a number of type {kind!a:.100}")
    raise NotPlainError(described(found))


def _expect(kind: type | tuple[type, ...], value: Any) -> Any:
    if not isinstance(value, kind):
        raise NotPlainError(f"{described(value)} in the wrong place")
    return value


def described(what: object) -> str:
    """Return a noun for what was found, for messages."""
    if isinstance(what, Call):
        return f"a call of {ascii(what.function.text)[1:-1]}"
    return f"a value of type {type(what).__name__.lower()}"
