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
    """A model whose links are on several ranks, for model parallelism.

    On each rank, add the links that this rank computes, in the order of computation. For each
    link, name the ranks that send its inputs and receive its outputs. Forward receives, computes
    and sends in this order, and backward in the reverse order. Choose the orders so that no two
    ranks wait for each other: that would be a deadlock.

    Parameters
    ----------
    comm : CommunicatorBase
        Communicator of the ranks; copies of the model share it. After unpickling a model, set
        its attribute ``comm``.

    Examples
    --------
    An encoder and a decoder on rank 0, and the layer between them on rank 1:

    >>> model = chainermn.MultiNodeChainList(comm)
    >>> if comm.rank == 0:
    ...     model.add_link(L.Linear(8, 4), rank_in=None, rank_out=1)
    ...     model.add_link(L.Linear(3, 8), rank_in=1, rank_out=None)
    ...     y = model(np.ones((5, 8), np.float32))
    ... else:
    ...     model.add_link(L.Linear(4, 3), rank_in=0, rank_out=0)
    ...     y = model()
    >>> y.shape  # on rank 1, a delegate variable
    (5, 8)
    (0,)
    >>> F.sum(y).backward()
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
            Link with one argument per rank in ``rank_in``: a variable, or a tuple of variables if
            the link on that rank returns a tuple.
        rank_in : int or sequence of int, optional
            Ranks that send its arguments. None stands for the arguments of the model. The number
            of this rank stands for the output of an earlier link: the first that is still unused.
        rank_out : int or sequence of int, optional
            Ranks that receive its output. None makes it the output of the model; only one link
            per rank may have None.

        Raises
        ------
        TypeError, ValueError
            If a rank is not an int or does not exist, or if two links have ``rank_out=None``.
        """
        peers = _Peers(self._ranks(rank_in, "rank_in"), self._ranks(rank_out, "rank_out"))
        if peers.dests is None and any(other.dests is None for other in self._peers):
            raise ValueError(
                f"rank {self.comm.rank}: a link with rank_out=None has been added before; on each "
                "rank, only one link can compute the output of the model"
            )
        super().add_link(link)
        self._peers += (peers,)

    def forward(self, *inputs: Any) -> Any:
        """Compute the links of this rank.

        Parameters
        ----------
        *inputs
            Arguments of the links with ``rank_in=None``.

        Returns
        -------
        chainer.Variable or tuple of chainer.Variable
            Output of the link with ``rank_out=None``. On a rank without such a link, a delegate
            variable: float32 with shape ``(0,)``. Every rank must run backward from its result,
            or from a variable computed from it.

        Raises
        ------
        RuntimeError
            If a link has this rank in ``rank_in``, and no earlier link has an unused output.
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
    """The messages of one forward; each depends on the one before."""

    def __init__(self, comm: CommunicatorBase) -> None:
        self._comm = comm
        self._kept: deque[Any] = deque()
        self.delegate: chainer.Variable | None = None

    def take(self, rank: int) -> Any:
        if rank == self._comm.rank:
            if not self._kept:
                raise RuntimeError(
                    f"MultiNodeChainList on rank {rank}: a link takes its input from this rank, "
                    "but no earlier link has an output for it; first add a link with this rank in "
                    "rank_out"
                )
            return self._kept.popleft()
        received: Any = recv(self._comm, rank, self.delegate, force_tuple=True)
        # Backward must pass here even if no link uses the received variables.
        self.delegate, *xs = WithDelegate().apply(received)
        return tuple(xs) if len(xs) > 1 else xs[0]

    def give(self, y: Any, rank: int) -> None:
        if rank == self._comm.rank:
            self._kept.append(y)
            return
        ys = tuple(y) if isinstance(y, list | tuple) else (y,)
        self.delegate = send(pseudo_connect(self.delegate, *ys), self._comm, rank)
