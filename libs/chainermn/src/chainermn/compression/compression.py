"""The interface of compressions, and its types."""

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
    """The gradient of a parameter on this rank, and its memory from earlier steps."""

    name: str
    gradient: Array  # flat; read-only
    memory: Memory


class Means(NamedTuple):
    """Means of gradients over all ranks, still compressed; the same on all ranks.

    ``is_finite`` is a bool, or a bool array on a GPU that may still compute it.
    """

    write: Sequence[Callable[[Array], None]]  # each fills a flat array of `Memory.dtype`
    is_finite: Array | bool


#: A generator that yields the requests it waits for, and returns the means of gradients.
Exchange: TypeAlias = Generator[Pending, None, Means]


@dataclass(frozen=True, kw_only=True)
class Compression(ABC):
    """Base class of compressions, for writing your own.

    Parameters
    ----------
    start_iteration : int
        Number of steps without compression at the start, when gradients are large and change
        quickly.

    Examples
    --------
    All compressions have this parameter:

    >>> issubclass(chainermn.compression.TopK, chainermn.compression.Compression)
    True
    >>> chainermn.compression.TopK(start_iteration=100).start_iteration
    100
    """

    start_iteration: int = 0

    #: Names of the arrays that each parameter keeps from one step to the next.
    remembers: ClassVar[tuple[str, ...]]
    #: Whether `exchange` also gets the gradients that are not compressed, because they cost no
    #: latency in a message that it sends anyway.
    takes_all: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._check("start_iteration", 0)

    def _check(self, name: str, least: float, most: float | None = None, kind: type = int) -> None:
        check_number(f"{type(self).__name__}: {name}", getattr(self, name), least, most, kind)

    def check_optimizer(self, optimizer: chainer.Optimizer) -> None:
        """Raise ValueError if the compression does not work with this optimizer."""

    def arithmetic(self) -> bytes:
        """Return the results of a calculation that must be identical on all ranks."""
        return b""

    @abstractmethod
    def compresses(self, shape: tuple[int, ...]) -> bool:
        """Tell whether a gradient of this shape is compressed; others are sent as they are."""

    @abstractmethod
    def exchange(self, tensors: Sequence[Tensor], collectives: Collectives, step: int) -> Exchange:
        """Average gradients over all ranks, as precisely as the compression allows.

        Parameters
        ----------
        tensors : sequence of Tensor
            Gradients and their memories: the same on all ranks, except for their values.
        collectives : Collectives
            Communication of the ranks.
        step : int
            Number of steps with compression so far.
        """
