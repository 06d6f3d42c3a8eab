"""Check arguments that are easily mixed up; errors name the expected and the actual argument."""

from __future__ import annotations


def check_communicator(call: str, communicator: object, other: object) -> None:
    """Raise TypeError unless an argument is a communicator.

    ``call`` is the correct call, such as ``scatter_dataset(dataset, comm)``. ``other`` is the
    argument that may have been swapped with ``communicator``.
    """
    if _is_communicator(communicator):
        return
    name = call.partition("(")[0]
    if _is_communicator(other):
        raise TypeError(f"the arguments of {name} are swapped: write {call}")
    expected = "a communicator, as create_communicator returns"
    raise TypeError(f"{name}: expected {expected}, got {_described(communicator)}")


def check_has(where: str, argument: object, expected: str, *attributes: str) -> None:
    """Raise TypeError unless an argument has all these attributes and is not a class.

    ``where`` is the function that was called, ``expected`` a description such as ``an optimizer``.
    """
    if isinstance(argument, type) or not all(hasattr(argument, name) for name in attributes):
        raise TypeError(f"{where}: expected {expected}, got {_described(argument)}")


def check_number(
    what: str, value: float, least: float, most: float | None = None, kind: type = int
) -> None:
    """Raise ValueError unless an argument is a number from ``least`` to ``most``.

    ``what`` is the argument, such as ``LocalSGD: period``; ``kind`` is int, or float for any
    number.
    """
    is_number = isinstance(value, (int, kind)) and not isinstance(value, bool)
    if not is_number or not value >= least or (most is not None and value > most):
        expected = "an integer" if kind is int else "a number"
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{what} must be {expected} {limits}, got {value!r}")


def _is_communicator(value: object) -> bool:
    return hasattr(value, "allgather_obj") and not isinstance(value, type)


def _described(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__qualname__}, not one of its objects"
    return f"{value!r:.80} of type {type(value).__qualname__}"
