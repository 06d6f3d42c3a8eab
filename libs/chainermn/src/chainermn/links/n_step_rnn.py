"""Run recurrent networks over sequences that are divided among ranks."""

from __future__ import annotations

from typing import Any

import chainer
from chainer.links.rnn.n_step_rnn import NStepRNNBase

from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.functions.point_to_point_communication import recv, send
from chainermn.links.shared import CommunicatorHolder


class MultiNodeNStepRNN(CommunicatorHolder, chainer.Chain):
    """The recurrent link that :func:`create_multi_node_n_step_rnn` returns.

    Examples
    --------
    >>> rnn = chainermn.links.create_multi_node_n_step_rnn(L.NStepLSTM(1, 2, 3, 0.0), comm)
    >>> rnn.n_cells, rnn.actual_rnn.n_layers
    (2, 1)
    """

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
        """Number of hidden states: 2 for an LSTM (``hx`` and ``cx``), 1 for other links."""
        return int(self.actual_rnn.n_cells)

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        """Receive hidden states, compute, send hidden states.

        Parameters
        ----------
        *inputs
            Either ``xs``, a list of sequences of shape (length, in_size), or the arguments of
            ``actual_link``: ``hx, xs`` or ``hx, cx, xs``. With ``rank_in``, hidden states must be
            None.

        Returns
        -------
        tuple
            Results of ``actual_link``, ``hy, ys`` or ``hy, cy, ys``, and a delegate variable. Run
            backward from it, or connect it to a loss with `chainermn.functions.pseudo_connect`.
            Without ``rank_out``, it is None.

        Raises
        ------
        TypeError
            If the number of inputs is wrong.
        ValueError
            If hidden states are given although they come from another rank, or if their number
            is wrong.
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
                f"rank {rank}: hidden states come from rank {self.rank_in}; pass None, or only xs"
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
    """Create a recurrent link that passes its hidden states from rank to rank.

    Connected as ``None -> 0 -> 1 -> ... -> None``, the ranks together compute ``actual_link`` on
    the concatenated sequences. A bidirectional link works on the part of each rank separately.

    Parameters
    ----------
    actual_link : NStepLSTM, NStepBiLSTM, NStepGRU, NStepBiGRU, NStepRNNTanh, ...
        Link of ``chainer.links``, which becomes the child ``actual_rnn``.
    communicator : CommunicatorBase
        Communicator of the ranks; copies of the link share it. After unpickling a link, set its
        attribute ``comm``.
    rank_in : int, optional
        Rank that sends the initial hidden states. By default, they are arguments, or zeros.
    rank_out : int, optional
        Rank that receives the final hidden states.

    Returns
    -------
    MultiNodeNStepRNN
        Link that, called with ``xs``, returns the results of ``actual_link`` and a delegate
        variable. On ranks with ``rank_out``, run backward from the delegate. On ranks with
        ``rank_in``, backward must reach the received hidden states, from the delegate or from
        ``ys``.

    Raises
    ------
    ValueError
        If ``actual_link`` is anything else, or if a rank does not exist or is this rank.

    Examples
    --------
    Rank 0 reads the first part of a sequence and rank 1 the rest:

    >>> peers = {"rank_out": 1} if comm.rank == 0 else {"rank_in": 0}
    >>> rnn = L.NStepGRU(n_layers=1, in_size=2, out_size=3, dropout=0.0)
    >>> rnn = chainermn.links.create_multi_node_n_step_rnn(rnn, comm, **peers)
    >>> hy, ys, delegate = rnn([np.ones((4, 2), np.float32)])
    >>> if comm.rank == 0:
    ...     delegate.backward()
    ... else:
    ...     F.sum(ys[0]).backward()
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
