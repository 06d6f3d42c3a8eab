"""Read pickles without running them.

Unpickling calls whatever functions a pickle names. Here, a call becomes a record of the name and
of the arguments, so a pickle can only describe data.
"""

import os
import pickletools
from dataclasses import dataclass
from typing import Any

import numpy as np

CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
LITERALS = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE"}
LITERALS |= {"SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"}
EMPTY = {"EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": dict}
KINDS = {f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)}  # of integers
MARK = object()


class Name(str):
    """A module and a name in it."""


@dataclass(eq=False)  # a key must not compare all that a call holds
class Call:
    """A call that unpickling would make, and the state that it would give to the result."""

    function: Name
    arguments: tuple[Any, ...]
    state: Any = None


def read(pickle: bytes) -> Any:
    """Return what a pickle of protocol 2 or later describes.

    Strings of Python 2 become bytes.

    Raises
    ------
    Exception
        If it is not a pickle, or has anything other than numbers, strings, tuples, lists,
        dictionaries by strings, and calls.
    """
    stack: list[Any] = []
    memo: dict[int, Any] = {}

    def after_mark() -> list[Any]:
        items = []
        while (item := stack.pop()) is not MARK:
            items.append(item)
        return items[::-1]

    for code, argument, _ in pickletools.genops(pickle):
        match code.name:
            case "PROTO" | "FRAME" | "STOP":
                pass
            case name if name in CONSTANTS:
                stack.append(CONSTANTS[name])
            case name if name in LITERALS:
                stack.append(argument)
            case "SHORT_BINSTRING" | "BINSTRING":
                stack.append(argument.encode("latin-1"))
            case name if name in EMPTY:
                stack.append(EMPTY[name]())
            case "MARK":
                stack.append(MARK)
            case "TUPLE1" | "TUPLE2" | "TUPLE3" as name:
                length = int(name[-1])
                stack[-length:] = [tuple(stack[-length:])]
            case "TUPLE":
                stack.append(tuple(after_mark()))
            case "APPEND" | "APPENDS" as name:
                items = after_mark() if name == "APPENDS" else [stack.pop()]
                expect(list, stack[-1]).extend(items)
            case "SETITEM" | "SETITEMS" as name:
                items = after_mark() if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
                keys = [expect((str, bytes, Call), key) for key in items[::2]]
                expect(dict, stack[-1]).update(zip(keys, items[1::2], strict=True))
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "GLOBAL":
                stack.append(Name(argument.replace(" ", ".")))
            case "STACK_GLOBAL":
                stack[-2:] = [Name(".".join(stack[-2:]))]
            case "REDUCE":
                arguments = expect(tuple, stack.pop())
                stack[-1] = Call(expect(Name, stack[-1]), arguments)
            case "BUILD":
                state = stack.pop()
                expect(Call, stack[-1]).state = state
            case name:
                raise ValueError(f"it has the instruction {name}")
    (found,) = stack
    return found


def string(found: Any) -> str | bytes:
    """Return what was found as a string; bytes may be a call, as protocol 2 has none."""
    match found:
        case str() | bytes() | bytearray():
            return found
        case Call("_codecs.encode", (str(text), "latin1")):
            return text.encode("latin-1")
    raise ValueError(f"expected a string, got {type(found).__name__}")


def array(found: Any) -> np.ndarray:
    """Return what was found as an array, which must be one of integers."""
    match found:
        case Call(
            "numpy.core.multiarray._reconstruct" | "numpy._core.multiarray._reconstruct",
            ("numpy.ndarray", *_),
            (_, tuple(shape), dtype, False, content),
        ):
            pass
        case Call(
            "numpy.core.numeric._frombuffer" | "numpy._core.numeric._frombuffer",
            (content, dtype, tuple(shape), "C"),
        ):
            pass
        case _:
            raise ValueError(f"expected an array, got {type(found).__name__}")
    match dtype:
        case Call("numpy.dtype", (str() | bytes() as kind, *_), (_, str() | bytes() as order, *_)):
            kind, order = os.fsdecode(kind), os.fsdecode(order)
            if kind in KINDS and order in ("|", "<", ">"):
                return np.frombuffer(string(content), order + kind).reshape(shape)
    raise ValueError("expected an array of integers")


def expect(kind: type | tuple[type, ...], value: Any) -> Any:
    """Return a value after checking its type."""
    if not isinstance(value, kind):
        raise ValueError(f"it has a value of type {type(value).__name__} in the wrong place")
    return value
