"""Divide a model among ranks."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import chainer

from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.functions.point_to_point_communication import recv, send
from chainermn.functions.pseudo_connect import WithDelegate, pseudo_connect
from chainermn.links.shared import CommunicatorHolder

Ranks: TypeAlias = int | Sequence[int] | None


class _Peers(NamedTuple):
    sources: tuple[int, ...] | None
    dests: tuple[int, ...] | None


class MultiNodeChainList(CommunicatorHolder, chainer.ChainList):
    """A model made of links on several ranks, for model parallelism.

    Each rank adds the links that it computes, in the order of computation, with the ranks that
    their inputs come from and their outputs go to. Forward receives, computes and sends in this
    order, backward in the reverse order, even if a link does not use all that it receives. Choose
    the orders so that no two ranks wait for each other: that would be a deadlock.

    Parameters
    ----------
    comm : CommunicatorBase
        Shared by copies of the link. After unpickling, set it by ``link.comm = ...``.

    Examples
    --------
    An encoder and a decoder on rank 0, with the middle of the model on rank 1:

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
        self._peers: tuple[_Peers, ...] = ()

    def add_link(self, link: chainer.Link, rank_in: Ranks = None, rank_out: Ranks = None) -> None:
        """Add a link that this rank computes.

        Parameters
        ----------
        link : chainer.Link
            Link that takes one argument per rank in ``rank_in``: a variable, or a tuple of
            variables if the link there returns a tuple.
        rank_in : int or sequence of int, optional
            Ranks that its arguments come from. None means the arguments of the model. This rank
            means the output of an earlier link: the first one not yet taken.
        rank_out : int or sequence of int, optional
            Ranks that its output goes to. None means that it is the output of the model; at most
            one link per rank may have None.

        Raises
        ------
        TypeError, ValueError
            If a rank is not an int or does not exist, or two links have ``rank_out=None``.
        """
        peers = _Peers(self._ranks(rank_in, "rank_in"), self._ranks(rank_out, "rank_out"))
        if peers.dests is None and any(other.dests is None for other in self._peers):
            raise ValueError(
                f"rank {self.comm.rank}: a link with rank_out=None has been added before; on each "
                "rank, only one link can give the output of the model"
            )
        super().add_link(link)
        self._peers += (peers,)

    def forward(self, *inputs: Any) -> Any:
        """Compute the part of this rank.

        Parameters
        ----------
        *inputs
            Arguments of the links with ``rank_in=None``.

        Returns
        -------
        chainer.Variable or tuple of chainer.Variable
            The output of the link with ``rank_out=None``. If this rank has none, a delegate:
            float32, of shape ``(0,)``. Every rank must call ``backward()`` of its result, or of
            a variable computed from it.

        Raises
        ------
        RuntimeError
            If a link with this rank in ``rank_in`` finds no output of an earlier one.
        """
        messages = _Messages(self.comm)
        output = None
        for link, (sources, dests) in zip(self.children(), self._peers, strict=True):
            y = link(*(inputs if sources is None else map(messages.take, sources)))
            if dests is None:
                output = y
            else:
                for rank in dests:
                    messages.give(y, rank)
        if messages.delegate is None or output is None:
            return messages.delegate if output is None else output
        if isinstance(output, list | tuple):
            return pseudo_connect(messages.delegate, *output)
        return pseudo_connect(messages.delegate, output)[0]

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


class _Messages:
    """Messages of one forward, each of which depends on the one before."""

    def __init__(self, comm: CommunicatorBase) -> None:
        self._comm = comm
        self._kept: deque[Any] = deque()
        self.delegate: chainer.Variable | None = None

    def take(self, rank: int) -> Any:
        if rank == self._comm.rank:
            if not self._kept:
                raise RuntimeError(
                    f"MultiNodeChainList on rank {rank}: a link takes its input from this rank, "
                    "but no earlier link gives one; first add a link with this rank in rank_out"
                )
            return self._kept.popleft()
        received: Any = recv(self._comm, rank, self.delegate, force_tuple=True)
        # Backward must come through here even if no link uses the received variables.
        self.delegate, *xs = WithDelegate().apply(received)
        return tuple(xs) if len(xs) > 1 else xs[0]

    def give(self, y: Any, rank: int) -> None:
        if rank == self._comm.rank:
            self._kept.append(y)
            return
        ys = tuple(y) if isinstance(y, list | tuple) else (y,)
        self.delegate = send(pseudo_connect(self.delegate, *ys), self._comm, rank)
