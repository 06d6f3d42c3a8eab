"""Send variables from one rank to another, and their gradients back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import chainer
import numpy as np

from chainermn.agreement import InputError, attempt, raise_errors_of
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.functions.pseudo_connect import pseudo_connect
from chainermn.functions.variables import as_variable, empty_delegate, layouts, or_zeros, zeros


class _Header(NamedTuple):
    """Header that precedes the arrays of a message."""

    number: int
    """Number of the message, as counted by its sender."""
    answers: int | None
    """Number of the message whose gradients these are; None in forward."""
    wanted: tuple[bool, ...]
    """Whether the sender wants a gradient, by array."""


_numbers = itertools.count()


class _Message(chainer.FunctionNode):
    """One end of a message."""

    def __init__(
        self, comm: CommunicatorBase, peer_rank: int, peer_tag: int, header: _Header
    ) -> None:
        super().__init__()
        self.comm = comm
        self.peer_rank = peer_rank
        self.peer_tag = peer_tag
        self._header = header

    @property
    def label(self) -> str:
        """Name of the function in drawings of the graph."""
        return f"{type(self).__name__} (peer_rank: {self.peer_rank})"


class Send(_Message):
    """Sends arrays and returns a delegate variable. Its backward is `Recv`."""

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Send the header, then the inputs."""
        self.comm.send_obj(self._header, self.peer_rank, self.peer_tag)
        self.comm.send(tuple(inputs), self.peer_rank, self.peer_tag)
        return (empty_delegate(chainer.backend.get_array_module(*inputs)),)

    def backward(
        self, indexes: tuple[int, ...], gys: tuple[chainer.Variable | None, ...]
    ) -> tuple[chainer.Variable | None, ...]:
        """Receive the gradients of the arrays that were sent."""
        number, _, wanted = self._header
        if not any(wanted):
            return (None,) * len(wanted)
        gxs = iter(_recv(self.comm, self.peer_rank, gys[0], self.peer_tag, answers=number))
        return tuple(next(gxs) if wants else None for wants in wanted)


class Recv(_Message):
    """Takes a delegate variable and returns received arrays. Its backward is `Send`.

    The header has been received before.
    """

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Receive as many arrays as were sent."""
        (self._anchor,) = layouts(inputs)
        received: Any = self.comm.recv(self.peer_rank, self.peer_tag)
        self._outputs = layouts(received)
        return received

    def backward(
        self, indexes: tuple[int, ...], gys: tuple[chainer.Variable | None, ...]
    ) -> tuple[chainer.Variable, ...]:
        """Send the gradients that the sender wants."""
        number, _, wanted = self._header
        gradients = or_zeros(gys, self._outputs)
        answer = [gradient for gradient, wants in zip(gradients, wanted, strict=True) if wants]
        if not answer:
            return (zeros(self._anchor),)
        return (_send(answer, self.comm, self.peer_rank, self.peer_tag, answers=number),)


def send(
    x: chainer.Variable | Sequence[chainer.Variable],
    communicator: CommunicatorBase,
    rank: int,
    tag: int = 0,
) -> chainer.Variable:
    """Send variables to another rank, which must call :func:`recv`.

    Run backward on both ranks: here it waits for the gradients that the backward of :func:`recv`
    sends. It hangs if the loss of the other rank does not depend on the received variables; use
    :func:`pseudo_connect` there. If no variable requires a gradient, nothing is sent back.

    Parameters
    ----------
    x : chainer.Variable or ndarray, or a list or tuple of them
        Variables to send, of any shapes and dtypes. Integers and bool have no gradients.
    communicator : CommunicatorBase
        Communicator of both ranks.
    rank : int
        Rank that receives them; not this rank.
    tag : int
        Number that :func:`recv` must give too, to tell messages apart.

    Returns
    -------
    chainer.Variable
        Delegate variable: float32 with shape ``(0,)``. Backward from it computes the gradients
        of ``x``. Pass it to :func:`recv` or :func:`pseudo_connect`, or call its ``backward()``
        at the end.

    Raises
    ------
    TypeError, ValueError
        On both ranks, if ``x`` is anything else, or empty. On this rank, if ``rank`` is not
        another rank of the communicator.
    RuntimeError
        In backward, if the gradients of another message arrive, because the two ranks
        communicate in different orders.

    Examples
    --------
    Rank 0 sends ``x``; rank 1 computes a loss from it. Both run backward:

    >>> if comm.rank == 0:
    ...     x = chainer.Variable(np.float32([1, 2]))
    ...     chainermn.functions.send(x, comm, rank=1).backward()
    ...     print("gradient:", x.grad)
    ... else:
    ...     loss = F.sum(3 * chainermn.functions.recv(comm, rank=0))
    ...     loss.backward()
    gradient: [3. 3.]
    """
    _check_peer(communicator, rank, "send")
    return _send(x, communicator, rank, tag)


def recv(
    communicator: CommunicatorBase,
    rank: int,
    delegate_variable: chainer.Variable | None = None,
    tag: int = 0,
    force_tuple: bool = False,
) -> chainer.Variable | tuple[chainer.Variable, ...]:
    """Receive the variables that another rank sends with :func:`send`.

    Backward sends their gradients back. Use at least one of the variables, because :func:`send`
    waits for gradients in backward. Those of unused variables are zeros.

    Parameters
    ----------
    communicator : CommunicatorBase
        Communicator of both ranks.
    rank : int
        Rank that sends; not this rank.
    delegate_variable : chainer.Variable, optional
        Delegate variable that :func:`send` returned on this rank. It makes the result depend on
        that call, so that backward reaches this call first. You need it if the other rank computes
        the received variables from those that this rank sent.
    tag : int
        Number that the sender gives to :func:`send`.
    force_tuple : bool
        Whether to return a tuple even for a single variable.

    Returns
    -------
    chainer.Variable or tuple of chainer.Variable
        Variables with the shapes and dtypes that were sent.

    Raises
    ------
    TypeError, ValueError
        For the reasons of :func:`send`.

    Examples
    --------
    Rank 0 sends ``x`` to rank 1, which sends its square back:

    >>> from chainermn.functions import recv, send
    >>> if comm.rank == 0:
    ...     x = chainer.Variable(np.array(3, np.float32))
    ...     delegate = send(x, comm, rank=1)
    ...     y = recv(comm, rank=1, delegate_variable=delegate)
    ...     y.backward()
    ...     print(y.array, x.grad)
    ... else:
    ...     send(recv(comm, rank=0) ** 2, comm, rank=0).backward()
    9.0 6.0
    """
    _check_peer(communicator, rank, "recv")
    received = _recv(communicator, rank, delegate_variable, tag)
    return received if force_tuple or len(received) > 1 else received[0]


def _check_peer(comm: CommunicatorBase, rank: int, where: str) -> None:
    if rank == comm.rank:
        raise ValueError(
            f"{where} on rank {rank}: the other rank is this rank, which would wait for itself; "
            "use the variable directly"
        )
    if not 0 <= rank < comm.size:
        raise ValueError(
            f"{where} on rank {comm.rank}: expected a rank from 0 to {comm.size - 1}, got {rank}"
        )


def _send(
    x: Any, comm: CommunicatorBase, rank: int, tag: int, answers: int | None = None
) -> chainer.Variable:
    variables: Any = attempt(lambda: _as_variables(x))
    if isinstance(variables, InputError):
        comm.send_obj(variables, rank, tag)
    raise_errors_of({comm.rank: variables}, f"send to rank {rank}")
    records = chainer.config.enable_backprop
    wanted = tuple(records and v.requires_grad and v.dtype.kind in "fc" for v in variables)
    header = _Header(next(_numbers), answers, wanted)
    (delegate,) = Send(comm, rank, tag, header).apply(variables)
    return delegate


def _as_variables(x: Any) -> tuple[chainer.Variable, ...]:
    if not isinstance(x, list | tuple):
        return (as_variable(x),)
    if not x:
        raise ValueError("expected at least one variable, got none")
    return tuple(as_variable(variable) for variable in x)


def _recv(
    comm: CommunicatorBase,
    rank: int,
    delegate: chainer.Variable | None,
    tag: int,
    answers: int | None = None,
) -> tuple[chainer.Variable, ...]:
    header = comm.recv_obj(rank, tag=tag)
    raise_errors_of({rank: header}, f"recv on rank {comm.rank}")
    if header.answers != answers:
        raise RuntimeError(
            f"rank {comm.rank} waits for {_describe(answers)} from rank {rank} (tag {tag}), but "
            f"{_describe(header.answers)} came. The two ranks communicate in different orders: "
            "control the order of backward with the delegate_variable of recv or with "
            "pseudo_connect, or give the messages different tags"
        )
    # Chainer's functions cannot mix NumPy and CuPy arrays.
    xp = np if delegate is None else chainer.backend.get_array_module(delegate)
    anchor = chainer.Variable(empty_delegate(xp), requires_grad=any(header.wanted))
    if delegate is not None:
        (anchor,) = pseudo_connect(delegate, anchor)
    return Recv(comm, rank, tag, header).apply((anchor,))


def _describe(answers: int | None) -> str:
    return "a message of forward" if answers is None else f"the gradients of message {answers}"
