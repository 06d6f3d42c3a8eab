"""Checks that every rank makes together: either all go on, or all raise.

A check that only one rank makes and fails leaves the others waiting for it in the next
collective. So what a rank finds is first told to all.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from chainermn.communicators.transport.mpi import load_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")


@dataclass(frozen=True)
class Refusal:
    """What a rank says in place of its part when its input is wrong."""

    kind: type[Exception]
    message: str


def attempt(make: Callable[[], T]) -> T | Refusal:
    """Return ``make()``, or a `Refusal` for the exception that it raises."""
    try:
        return make()
    except Exception as error:
        kind = type(error) if type(error) in (TypeError, ValueError, IndexError) else TypeError
        return Refusal(kind, str(error) or repr(error))


def raise_refusals(parts: Mapping[int, Any], where: str) -> None:
    """Raise if any rank refused; ``parts`` maps ranks to their parts, the same on every rank.

    Raises
    ------
    TypeError, ValueError, IndexError
        What the first refusing rank raised, with its rank.
    """
    for rank, part in parts.items():
        if isinstance(part, Refusal):
            raise part.kind(f"{where}: rank {rank}: {part.message}")


def all_equal(mpi_comm: MPI.Intracomm, description: object) -> bool:
    """Tell whether ``repr(description)`` is the same on every rank. One small all-reduce."""
    digest = _digest(description)
    extremes = _maximum(mpi_comm, [digest, -digest])
    return bool(extremes[0] == -extremes[1])


def agree(
    mpi_comm: MPI.Intracomm, description: Hashable, flags: Sequence[bool]
) -> tuple[bool, tuple[bool, ...]]:
    """Tell whether ``description`` is the same on every rank, and which flags are true on any.

    One small all-reduce. As `all_equal` and `any_of_each`, but descriptions are remembered, so
    that a long one that seldom changes costs little.
    """
    digest = _remembered_digest(description)
    largest, negated, *found = _maximum(mpi_comm, [digest, -digest, *flags])
    return largest == -negated, tuple(map(bool, found))


def any_true(mpi_comm: MPI.Intracomm, flag: bool) -> bool:
    """Tell whether ``flag`` is true on any rank. One small all-reduce."""
    return any_of_each(mpi_comm, [flag])[0]


def any_of_each(mpi_comm: MPI.Intracomm, flags: Sequence[bool]) -> tuple[bool, ...]:
    """Tell for each of ``flags`` whether it is true on any rank. One small all-reduce."""
    return tuple(bool(maximum) for maximum in _maximum(mpi_comm, list(flags)))


def check_equal(mpi_comm: MPI.Intracomm, description: object, where: str) -> None:
    """Raise on all ranks alike unless ``description`` is the same on all of them.

    Parameters
    ----------
    description : object
        Compared by its ``repr``; or a `Refusal`.
    where : str
        What the user called, for the message.

    Raises
    ------
    ValueError
        If the ranks differ.
    TypeError, ValueError, IndexError
        If a rank refused.
    """
    if all_equal(mpi_comm, description) and not isinstance(description, Refusal):
        return
    everywhere = mpi_comm.allgather(description)
    raise_refusals(dict(enumerate(everywhere)), where)
    shown = "; ".join(f"rank {rank}: {part}" for rank, part in enumerate(everywhere))
    raise ValueError(f"{where}: the ranks disagree, but all must give the same. {shown}")


def _digest(description: object) -> int:
    return zlib.crc32(repr(description).encode())


_remembered_digest = functools.lru_cache(16)(_digest)


def _maximum(mpi_comm: MPI.Intracomm, numbers: list[int]) -> list[int]:
    mpi = load_mpi()
    result = np.array(numbers, np.int64)
    mpi_comm.Allreduce(mpi.IN_PLACE, result, mpi.MAX)
    return [int(number) for number in result]
