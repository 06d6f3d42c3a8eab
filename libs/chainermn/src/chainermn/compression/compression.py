"""What a compression is, and what it is given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeAlias

import chainer

from chainermn.arguments import check_number
from chainermn.compression.memory import Memory
from chainermn.transport.collectives import Collectives
from chainermn.transport.reducer import Array, Pending


class Tensor(NamedTuple):
    """The gradient of a parameter on this rank, and what is remembered of it."""

    name: str
    gradient: Array  # flat; read-only
    memory: Memory


class Means(NamedTuple):
    """The means of gradients over the ranks, still compressed: the same on all ranks.

    ``is_finite`` is a bool, or an array of one that may still be computed.
    """

    write: Sequence[Callable[[Array], None]]  # each fills a flat array of `Memory.dtype`
    is_finite: Array | bool


#: Yields what it has to wait for, and returns the means of the gradients that it was given.
Exchange: TypeAlias = Generator[Pending, None, Means]


@dataclass(frozen=True, kw_only=True)
class Compression(ABC):
    """Settings of a compression, and its algorithm.

    Parameters
    ----------
    start_iteration : int
        Number of steps before, in which gradients are exchanged as without compression. The first
        gradients of a network are large and change quickly.
    """

    start_iteration: int = 0

    #: Names of the arrays that are remembered of each parameter.
    remembers: ClassVar[tuple[str, ...]]
    #: Whether `exchange` also takes gradients that are not compressed, since they cost no latency
    #: in a message that it sends anyway.
    takes_all: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._check("start_iteration", 0)

    def _check(self, name: str, least: float, most: float | None = None, kind: type = int) -> None:
        check_number(f"{type(self).__name__}: {name}", getattr(self, name), least, most, kind)

    def check_optimizer(self, optimizer: chainer.Optimizer) -> None:
        """Raise a ValueError if this optimizer cannot use the means."""

    def arithmetic(self) -> bytes:
        """Return the results of arithmetic that must be the same, bit for bit, on all ranks."""
        return b""

    @abstractmethod
    def compresses(self, shape: tuple[int, ...]) -> bool:
        """Tell whether a parameter of this shape is compressed; others are sent as they are."""

    @abstractmethod
    def exchange(self, tensors: Sequence[Tensor], collectives: Collectives, step: int) -> Exchange:
        """Average gradients over the ranks, as exactly as their compression allows.

        Parameters
        ----------
        tensors : sequence of Tensor
            The same on all ranks, except for the values of gradients and memories.
        collectives : Collectives
        step : int
            Number of steps with compression so far.
        """
