"""A model whose parts are on several ranks."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import chainer

from chainermn.functions.point_to_point_communication import recv, send
from chainermn.functions.pseudo_connect import WithDelegate, pseudo_connect
from chainermn.links.shared import CommunicatorHolder

if TYPE_CHECKING:
    from chainermn.communicators.communicator_base import CommunicatorBase

Ranks: TypeAlias = int | Sequence[int] | None


class _Route(NamedTuple):
    sources: tuple[int, ...] | None
    dests: tuple[int, ...] | None


class MultiNodeChainList(CommunicatorHolder, chainer.ChainList):
    """A model made of links on several ranks, for model parallelism.

    Each rank adds the links that it computes, in the order in which it computes them, and says
    where their inputs come from and their outputs go to. Forward receives, computes and sends in
    this order, and backward in the reverse, whether or not a link uses all that it received. It
    does not end if the orders of two ranks wait for each other.

    Parameters
    ----------
    comm : CommunicatorBase
        Shared by copies of the link; an unpickled link has none until ``link.comm = ...``.

    Examples
    --------
    An encoder and a decoder on rank 0, and what is between them on rank 1:

    >>> model = MultiNodeChainList(comm)                             # doctest: +SKIP
    >>> if comm.rank == 0:                                           # doctest: +SKIP
    ...     model.add_link(Encoder(), rank_in=None, rank_out=1)
    ...     model.add_link(Decoder(), rank_in=1, rank_out=None)
    ... else:
    ...     model.add_link(Middle(), rank_in=0, rank_out=0)
    """

    def __init__(self, comm: CommunicatorBase) -> None:
        super().__init__()
        self.comm = comm
        self._routes: tuple[_Route, ...] = ()

    def add_link(self, link: chainer.Link, rank_in: Ranks = None, rank_out: Ranks = None) -> None:
        """Add a link that this rank computes.

        Parameters
        ----------
        link : chainer.Link
            Takes one argument for each rank of ``rank_in``: a variable, or a tuple of them if
            that is what the link there returns.
        rank_in : int or sequence of int, optional
            Where its arguments come from; None: they are those of the model. May be this rank:
            then it is the output of an earlier link, the first not yet taken.
        rank_out : int or sequence of int, optional
            Where its output goes to, to each of them; None: it is that of the model. One link
            of a rank at most.

        Raises
        ------
        TypeError, ValueError
            If a rank is not an int or does not exist, or two links have ``rank_out=None``.
        """
        route = _Route(self._ranks(rank_in, "rank_in"), self._ranks(rank_out, "rank_out"))
        if route.dests is None and any(other.dests is None for other in self._routes):
            raise ValueError(
                f"rank {self.comm.rank}: a link with rank_out=None has been added before; the "
                "output of a model on one rank is that of one link"
            )
        super().add_link(link)
        self._routes += (route,)

    def forward(self, *inputs: Any) -> Any:
        """Compute the part of this rank.

        Parameters
        ----------
        *inputs
            Arguments of the links with ``rank_in=None``.

        Returns
        -------
        chainer.Variable or tuple of chainer.Variable
            The output of the link with ``rank_out=None``. If there is none, a delegate: float32,
            of shape ``(0,)``. Every rank has to call ``backward()`` of what it got, or of
            something made from it.

        Raises
        ------
        RuntimeError
            If a link with this rank in ``rank_in`` finds no output of an earlier one.
        """
        journey = _Journey(self.comm)
        output = None
        for link, (sources, dests) in zip(self.children(), self._routes, strict=True):
            y = link(*(inputs if sources is None else [journey.take(rank) for rank in sources]))
            if dests is None:
                output = y
            else:
                for rank in dests:
                    journey.give(y, rank)
        if journey.delegate is None or output is None:
            return journey.delegate if output is None else output
        if isinstance(output, list | tuple):
            return pseudo_connect(journey.delegate, *output)
        return pseudo_connect(journey.delegate, output)[0]

    def _ranks(self, ranks: Ranks, name: str) -> tuple[int, ...] | None:
        if ranks is None:
            return None
        where, size = f"{name} on rank {self.comm.rank}", self.comm.size
        try:
            several = tuple(
                operator.index(rank)
                for rank in (ranks if isinstance(ranks, Iterable) else [ranks])
            )
        except TypeError:
            raise TypeError(
                f"{where}: expected None, an int or a sequence of int, got {ranks!r}"
            ) from None
        if not several or not all(0 <= rank < size for rank in several):
            raise ValueError(f"{where}: expected ranks from 0 to {size - 1}, got {ranks!r}")
        return several


class _Journey:
    """The messages of one forward, each of which depends on the one before."""

    def __init__(self, comm: CommunicatorBase) -> None:
        self._comm = comm
        self._kept: deque[Any] = deque()
        self.delegate: chainer.Variable | None = None

    def take(self, rank: int) -> Any:
        if rank == self._comm.rank:
            if not self._kept:
                raise RuntimeError(
                    f"MultiNodeChainList on rank {rank}: a link takes its input from this rank, "
                    "but no earlier link gives one; add a link with this rank in rank_out before"
                )
            return self._kept.popleft()
        received: Any = recv(self._comm, rank, self.delegate, force_tuple=True)
        # Backward has to come by here even if no link uses what was received.
        self.delegate, *xs = WithDelegate().apply(received)
        return tuple(xs) if len(xs) > 1 else xs[0]

    def give(self, y: Any, rank: int) -> None:
        if rank == self._comm.rank:
            self._kept.append(y)
            return
        ys = tuple(y) if isinstance(y, list | tuple) else (y,)
        self.delegate = send(pseudo_connect(self.delegate, *ys), self._comm, rank)
