"""Run recurrent networks over sequences that are divided among ranks."""

from __future__ import annotations

from typing import Any

import chainer
from chainer.links.rnn.n_step_rnn import NStepRNNBase

from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.functions.point_to_point_communication import recv, send
from chainermn.links.shared import CommunicatorHolder


class MultiNodeNStepRNN(CommunicatorHolder, chainer.Chain):
    """A recurrent link on one of several ranks; see :func:`create_multi_node_n_step_rnn`."""

    def __init__(
        self,
        link: NStepRNNBase,
        comm: CommunicatorBase,
        rank_in: int | None,
        rank_out: int | None,
    ) -> None:
        super().__init__()
        self.comm = comm
        self.rank_in = rank_in
        self.rank_out = rank_out
        with self.init_scope():
            self.actual_rnn = link

    @property
    def n_cells(self) -> int:
        """Number of hidden states: 2 of an LSTM (``hx``, ``cx``), 1 of the others."""
        return int(self.actual_rnn.n_cells)

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        """Receive hidden states, compute, send hidden states.

        Parameters
        ----------
        *inputs
            ``xs``, a list of sequences of shape (length, in_size); or ``hx, xs`` or
            ``hx, cx, xs``, as for ``actual_link``. Hidden states must be None if they are
            received.

        Returns
        -------
        tuple
            The results of ``actual_link``, ``hy, ys`` or ``hy, cy, ys``, followed by a delegate,
            which is None without ``rank_out``. Run backward from it, or connect it to a loss by
            `chainermn.functions.pseudo_connect`.

        Raises
        ------
        TypeError
            If the number of inputs is wrong.
        ValueError
            If hidden states are both given and received, or their number is wrong.
        """
        *hidden, xs = inputs or (None,)
        if not inputs or len(hidden) not in (0, self.n_cells):
            raise TypeError(
                f"expected xs, or {self.n_cells} hidden states and xs, got {len(inputs)} arguments"
            )
        states: Any = self._receive(hidden) if self.rank_in is not None else hidden
        *states, ys = self.actual_rnn(*(states or [None] * self.n_cells), xs)
        delegate = None
        if self.rank_out is not None:
            delegate = send(states, self.comm, self.rank_out)
        return (*states, ys, delegate)

    def _receive(self, hidden: list[Any]) -> Any:
        rank = self.comm.rank
        if any(state is not None for state in hidden):
            raise ValueError(
                f"rank {rank}: hidden states come from rank {self.rank_in}; give None, or xs alone"
            )
        states: Any = recv(self.comm, self.rank_in, force_tuple=True)  # type: ignore[arg-type]
        if len(states) != self.n_cells:
            raise ValueError(
                f"rank {rank}: expected {self.n_cells} hidden states from rank {self.rank_in}, "
                f"got {len(states)}; both ranks need a link of the same kind"
            )
        return states


def create_multi_node_n_step_rnn(
    actual_link: NStepRNNBase,
    communicator: CommunicatorBase,
    rank_in: int | None = None,
    rank_out: int | None = None,
) -> MultiNodeNStepRNN:
    """Pass the hidden states of a recurrent link from rank to rank.

    Ranks connected as ``None -> 0 -> 1 -> ... -> None`` together compute ``actual_link`` on the
    concatenated sequences. A bidirectional link is applied to the part of each rank in turn.

    Parameters
    ----------
    actual_link : NStepLSTM, NStepBiLSTM, NStepGRU, NStepBiGRU, NStepRNNTanh, ...
        A link of ``chainer.links``; becomes the child ``actual_rnn``.
    communicator : CommunicatorBase
        Shared by copies of the link. After unpickling, set it by ``link.comm = ...``.
    rank_in : int, optional
        Rank that initial hidden states come from. If None, they are arguments, or zeros.
    rank_out : int, optional
        Rank that final hidden states go to.

    Returns
    -------
    MultiNodeNStepRNN
        Called with ``xs``, it returns the results of ``actual_link`` and a delegate variable,
        from which backward starts on ranks with ``rank_out``. On ranks with ``rank_in``, backward
        must reach the received hidden states, from the delegate or from ``ys``.

    Raises
    ------
    ValueError
        If ``actual_link`` is anything else, or a rank does not exist or is this rank.
    """
    if not isinstance(actual_link, NStepRNNBase):
        raise ValueError(
            "expected an NStepLSTM, NStepGRU, NStepRNNTanh, ... of chainer.links, "
            f"got {type(actual_link)}"
        )
    rank, size = communicator.rank, communicator.size
    for name, peer in {"rank_in": rank_in, "rank_out": rank_out}.items():
        if peer is not None and (peer == rank or peer not in range(size)):
            raise ValueError(
                f"{name} on rank {rank}: expected None or another rank from 0 to {size - 1}, "
                f"got {peer!r}"
            )
    return MultiNodeNStepRNN(actual_link, communicator, rank_in, rank_out)
