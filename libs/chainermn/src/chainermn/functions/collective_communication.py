"""Collective calls on variables. The backward of each is another of these calls.

Every rank calls the same functions in the same order, and runs backward. In forward, the ranks
tell each other which function they call and whether any of their variables requires a gradient.
Then either every rank is connected to the graph, so that all reach backward, or none is.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import chainer
import numpy as np
from typing_extensions import override

from chainermn.agreement import InputError, attempt, raise_disagreement, raise_errors_of
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.functions.variables import as_variable, empty_delegate, layouts, or_zeros

Variables: TypeAlias = tuple[chainer.Variable, ...]


class _Ballot(NamedTuple):
    """Message from each rank to all others before a call."""

    call: str
    gradient: bool
    """Whether an input requires a gradient."""
    recording: bool
    """Whether the rank records a graph, so that it can reach backward."""
    inputs: tuple[str, ...]


class Collective(chainer.FunctionNode):
    """A collective call. A delegate stands in for the inputs or outputs that a rank lacks."""

    def __init__(self, comm: CommunicatorBase) -> None:
        super().__init__()
        self.comm = comm
        self.gives = True
        """Whether this rank has inputs."""
        self.gets = True
        """Whether this rank has outputs."""

    def __str__(self) -> str:
        return type(self).__name__.lower()

    def check(self, inputs: Sequence[tuple[str, ...]]) -> None:
        """Raise if the call is invalid. Every rank gets the same arguments, so all raise.

        ``inputs`` are the dtypes and shapes of the inputs, by rank.
        """

    @abstractmethod
    def communicate(self, xs: tuple[Any, ...]) -> Sequence[Any] | None:
        """Return output arrays for input arrays, or None on a rank without outputs."""

    @abstractmethod
    def adjoint(self) -> Collective:
        """Return the call that sends the gradients back."""

    def join(self, make: Callable[[], Variables], delegate: Any = None) -> Variables:
        """Apply it on all ranks together; return the outputs, or a delegate.

        ``make`` returns the inputs; if it raises, every rank raises. ``delegate`` stands in for
        the inputs of a rank that gives none.
        """
        made = attempt(make) if self.gives else ()
        ballots = self.comm.allgather_obj(
            made if isinstance(made, InputError) else self._ballot(made, delegate)
        )
        raise_errors_of(dict(enumerate(ballots)), str(self))
        _check_agreement(ballots)
        self.check([ballot.inputs for ballot in ballots])
        xs: Variables = made  # type: ignore[assignment]  # an InputError has been raised
        self._given = len(xs)
        if not any(ballot.gradient for ballot in ballots):
            with chainer.no_backprop_mode():
                return self.apply(xs or (chainer.Variable(empty_delegate()),))
        if not ballots[self.comm.rank].gradient or not xs:
            xp = chainer.backend.get_array_module(*xs)
            anchor = chainer.Variable(empty_delegate(xp)) if delegate is None else delegate
            xs = (*xs, anchor)
        return self.apply(xs)

    def _ballot(self, xs: Variables, delegate: Any) -> _Ballot:
        sources = xs if delegate is None else (*xs, delegate)
        required = any(v.requires_grad and v.dtype.kind in "fc" for v in sources)
        recording = bool(chainer.config.enable_backprop)
        inputs = tuple(f"{x.dtype.name}{list(x.shape)}" for x in xs)
        return _Ballot(str(self), required and recording, recording, inputs)

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Call :meth:`communicate`."""
        outputs = self.communicate(inputs[: self._given])
        if outputs is None:
            return (empty_delegate(chainer.backend.get_array_module(*inputs)),)
        self._outputs = layouts(outputs)
        return tuple(outputs)

    def backward(
        self, indexes: tuple[int, ...], gys: tuple[chainer.Variable | None, ...]
    ) -> tuple[chainer.Variable | None, ...]:
        """Send back gradients, which are zeros for outputs that were not used."""
        adjoint = self.adjoint()
        if self.gets:
            gxs = adjoint.join(lambda: or_zeros(gys, self._outputs))
        else:
            gxs = adjoint.join(tuple, gys[0])
        return (*gxs, *(None,) * (len(self.inputs) - len(gxs)))


class Rooted(Collective):
    """A collective call in which one rank, the root, has another part than the rest."""

    #: Whether only the root has inputs; otherwise, only the root has outputs.
    from_root: ClassVar[bool]

    def __init__(self, comm: CommunicatorBase, root: int) -> None:
        super().__init__(comm)
        self.root = root
        self.gives = comm.rank == root or not self.from_root
        self.gets = comm.rank == root or self.from_root

    def __str__(self) -> str:
        return f"{super().__str__()} with root={self.root}"

    @override
    def check(self, inputs: Sequence[tuple[str, ...]]) -> None:
        if self.root not in range(self.comm.size):
            raise ValueError(f"{self}: expected a root from 0 to {self.comm.size - 1}")


class AllGather(Collective):
    """Every rank gives one array and gets those of all ranks. Its backward is `ReduceScatter`."""

    @override
    def communicate(self, xs: tuple[Any, ...]) -> Sequence[Any]:
        return self.comm.allgather(xs[0])

    @override
    def adjoint(self) -> Collective:
        return ReduceScatter(self.comm)


class ReduceScatter(Collective):
    """Every rank gets the sum of one array from each rank. Its backward is `AllGather`."""

    def __str__(self) -> str:
        return "reduce_scatter"

    @override
    def check(self, inputs: Sequence[tuple[str, ...]]) -> None:
        if len(set(inputs)) > 1:
            shown = [", ".join(given) for given in inputs]
            raise_disagreement(shown, f"{self}, shapes and dtypes")

    @override
    def communicate(self, xs: tuple[Any, ...]) -> Sequence[Any]:
        parts = self.comm.alltoall(xs)
        dtype = parts[0].dtype
        total = parts[0].astype(np.float32 if dtype == np.float16 else dtype)
        for part in parts[1:]:
            total += part
        return (total.astype(dtype, copy=False),)

    @override
    def adjoint(self) -> Collective:
        return AllGather(self.comm)


class AllToAll(Collective):
    """Array ``i`` goes to rank ``i``. It is its own backward."""

    @override
    def communicate(self, xs: tuple[Any, ...]) -> Sequence[Any]:
        return self.comm.alltoall(xs)

    @override
    def adjoint(self) -> Collective:
        return AllToAll(self.comm)


class AllReduce(Collective):
    """Sum or mean over the ranks. It is its own backward."""

    def __init__(self, comm: CommunicatorBase, op: Literal["sum", "mean"]) -> None:
        super().__init__(comm)
        self.op = op

    def __str__(self) -> str:
        return f"allreduce with op={self.op!r}"

    @override
    def check(self, inputs: Sequence[tuple[str, ...]]) -> None:
        if self.op not in ("sum", "mean"):
            raise ValueError(f"{self}: expected op 'sum' or 'mean'")

    @override
    def communicate(self, xs: tuple[Any, ...]) -> Sequence[Any]:
        return (self.comm.allreduce(xs[0], self.op),)

    @override
    def adjoint(self) -> Collective:
        return AllReduce(self.comm, self.op)


class Bcast(Rooted):
    """Every rank gets the array of the root. Its backward is `Reduce`."""

    from_root = True

    @override
    def communicate(self, xs: tuple[Any, ...]) -> Sequence[Any]:
        return (self.comm.bcast(xs[0] if xs else None, root=self.root),)

    @override
    def adjoint(self) -> Collective:
        return Reduce(self.comm, self.root)


class Reduce(Rooted):
    """The root gets the sum of the arrays of all ranks. Its backward is `Bcast`."""

    from_root = False

    @override
    def communicate(self, xs: tuple[Any, ...]) -> Sequence[Any] | None:
        total = self.comm.allreduce(xs[0])
        return (total,) if self.gets else None

    @override
    def adjoint(self) -> Collective:
        return Bcast(self.comm, self.root)


class Gather(Rooted):
    """The root gets one array from each rank. Its backward is `Scatter`."""

    from_root = False

    @override
    def communicate(self, xs: tuple[Any, ...]) -> Sequence[Any] | None:
        return self.comm.gather(xs[0], self.root)

    @override
    def adjoint(self) -> Collective:
        return Scatter(self.comm, self.root)


class Scatter(Rooted):
    """Each rank gets one array of the root. Its backward is `Gather`."""

    from_root = True

    @override
    def communicate(self, xs: tuple[Any, ...]) -> Sequence[Any]:
        return (self.comm.scatter(xs or None, self.root),)

    @override
    def adjoint(self) -> Collective:
        return Gather(self.comm, self.root)


def allgather(comm: CommunicatorBase, x: chainer.Variable) -> tuple[chainer.Variable, ...]:
    """Give every rank the variables of all ranks.

    Backward adds up, on each rank, the gradients of its variable on all ranks.

    Parameters
    ----------
    comm : CommunicatorBase
    x : chainer.Variable or ndarray
        Shapes may differ from rank to rank, dtypes may not.

    Returns
    -------
    tuple of chainer.Variable
        One per rank. Every rank must run backward, through at least one of them.

    Raises
    ------
    TypeError, ValueError
        On every rank, if any rank gives anything else, or dtypes differ.
    RuntimeError
        On every rank, if the ranks call different functions, or if one needs a gradient and
        another records no graph (``chainer.no_backprop_mode``).
    """
    return AllGather(comm).join(lambda: (as_variable(x),))


def reduce_scatter(comm: CommunicatorBase, xs: Sequence[chainer.Variable]) -> chainer.Variable:
    """Return on rank ``i`` the sum over all ranks of their ``xs[i]``.

    Backward gives every rank the gradients of all sums, as :func:`allgather` does.

    Parameters
    ----------
    comm : CommunicatorBase
    xs : sequence of (chainer.Variable or ndarray), or one of shape (size, ...)
        One entry per rank, all of the same dtype. Entry ``i`` has the same shape on every rank;
        different entries may have different shapes.

    Returns
    -------
    chainer.Variable
        Sum, of the shape and dtype of ``xs[rank]``; float16 is added up in float32.

    Raises
    ------
    TypeError, ValueError
        On every rank, if any rank gives anything else or the ranks disagree.
    RuntimeError
        As for :func:`allgather`.
    """
    return ReduceScatter(comm).join(lambda: _one_each(comm, xs))[0]


def alltoall(
    comm: CommunicatorBase, xs: Sequence[chainer.Variable]
) -> tuple[chainer.Variable, ...]:
    """Send ``xs[i]`` to rank ``i``, for every ``i``.

    Backward sends each gradient to the rank that its variable came from.

    Parameters
    ----------
    comm : CommunicatorBase
    xs : sequence of (chainer.Variable or ndarray), or one of shape (size, ...)
        One entry per rank. Shapes may differ, dtypes may not.

    Returns
    -------
    tuple of chainer.Variable
        Entry ``i`` comes from rank ``i``. Every rank must run backward, through at least one of
        them.

    Raises
    ------
    TypeError, ValueError
        On every rank, if any rank gives anything else or another number of entries.
    RuntimeError
        As for :func:`allgather`.
    """
    return AllToAll(comm).join(lambda: _one_each(comm, xs))


def allreduce(
    comm: CommunicatorBase, x: chainer.Variable, op: Literal["sum", "mean"] = "sum"
) -> chainer.Variable:
    """Return the sum, or the mean, of the variables of all ranks.

    Backward reduces the gradients in the same way. They are the derivative of the sum of the
    losses of all ranks.

    Parameters
    ----------
    comm : CommunicatorBase
    x : chainer.Variable or ndarray
        Of the same shape and dtype on every rank.
    op : {'sum', 'mean'}

    Returns
    -------
    chainer.Variable
        The same values on every rank; float16 is added up in float32. Every rank must run
        backward through it.

    Raises
    ------
    TypeError, ValueError
        On every rank, if any rank gives anything else or the ranks disagree.
    RuntimeError
        As for :func:`allgather`.
    """
    return AllReduce(comm, op).join(lambda: (as_variable(x),))[0]


def bcast(comm: CommunicatorBase, x: chainer.Variable | None, root: int = 0) -> chainer.Variable:
    """Give every rank the variable of rank ``root``.

    Backward adds up the gradients of all ranks on ``root``.

    Parameters
    ----------
    comm : CommunicatorBase
    x : chainer.Variable or ndarray
        Variable to send, on ``root``; ignored elsewhere.
    root : int

    Returns
    -------
    chainer.Variable
        Every rank must run backward through it.

    Raises
    ------
    TypeError, ValueError
        On every rank, if ``root`` gives anything else, or is not a rank.
    RuntimeError
        As for :func:`allgather`. Calls with different roots count as different functions.
    """
    return Bcast(comm, root).join(lambda: (as_variable(x),))[0]


def gather(
    comm: CommunicatorBase, x: chainer.Variable, root: int = 0
) -> tuple[chainer.Variable, ...] | chainer.Variable:
    """Gather the variables of all ranks on ``root``.

    Backward scatters the gradients from there.

    Parameters
    ----------
    comm : CommunicatorBase
    x : chainer.Variable or ndarray
        Shapes may differ from rank to rank, dtypes may not.
    root : int

    Returns
    -------
    tuple of chainer.Variable, or chainer.Variable
        On ``root``, a tuple of one variable per rank. Elsewhere, a delegate: float32, of shape
        ``(0,)``; run backward from it, or connect it to a loss by :func:`pseudo_connect`.

    Raises
    ------
    TypeError, ValueError
        On every rank, if any rank gives anything else, dtypes differ, or ``root`` is not a
        rank.
    RuntimeError
        As for :func:`bcast`.
    """
    gathered = Gather(comm, root).join(lambda: (as_variable(x),))
    return gathered if comm.rank == root else gathered[0]


def scatter(
    comm: CommunicatorBase, xs: Sequence[chainer.Variable] | None, root: int = 0
) -> chainer.Variable:
    """Give rank ``i`` the variable ``xs[i]`` of rank ``root``.

    Backward gathers the gradients there.

    Parameters
    ----------
    comm : CommunicatorBase
    xs : sequence of (chainer.Variable or ndarray), or one of shape (size, ...)
        One entry per rank, on ``root``; ignored elsewhere. Shapes may differ, dtypes may not.
    root : int

    Returns
    -------
    chainer.Variable
        Every rank must run backward through it.

    Raises
    ------
    TypeError, ValueError
        On every rank, if ``root`` gives anything else or another number of entries, or is not a
        rank.
    RuntimeError
        As for :func:`bcast`.
    """
    return Scatter(comm, root).join(lambda: _one_each(comm, xs))[0]


def _one_each(comm: CommunicatorBase, xs: Any) -> Variables:
    """Return the entries of a sequence or an array: one per rank, all of one dtype."""
    if not isinstance(xs, list | tuple):
        stacked = as_variable(xs)
        if stacked.ndim == 0:
            raise TypeError("expected one entry per rank, got a single number")
        if stacked.shape[0] > 0:
            xs = chainer.functions.separate(stacked)
    if len(xs) != comm.size:
        raise ValueError(f"expected {comm.size} entries, one per rank, got {len(xs)}")
    entries = tuple(as_variable(x) for x in xs)
    dtypes = sorted({entry.dtype.name for entry in entries})
    if len(dtypes) > 1:
        raise ValueError(f"expected entries of one dtype, got {', '.join(dtypes)}")
    return entries


def _check_agreement(ballots: Sequence[_Ballot]) -> None:
    calls = [ballot.call for ballot in ballots]
    if len(set(calls)) > 1:
        shown = "; ".join(f"rank {rank}: {call}" for rank, call in enumerate(calls))
        raise RuntimeError(
            f"the ranks call different functions: {shown}. All must make the same calls in the "
            "same order. If this is in backward, its order follows from the depth of the graph: "
            "fix it by pseudo_connect"
        )
    needing = [rank for rank, ballot in enumerate(ballots) if ballot.gradient]
    silent = [rank for rank, ballot in enumerate(ballots) if not ballot.recording]
    if needing and silent:
        raise RuntimeError(
            f"{calls[0]}: rank {needing[0]} needs a gradient, but rank {silent[0]} records no "
            "graph (chainer.config.enable_backprop is off there) and would never come to "
            "backward; set it alike on all ranks"
        )
