"""Collective calls on variables. The backward of each is another of these calls.

Every rank calls the same functions in the same order, and runs backward. In forward, the ranks
tell each other which function they call, and whether any of their variables requires a gradient.
Then either all ranks are connected to the graph, so that all reach backward, or none is.
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
    """Message that each rank sends to all others before a call."""

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
        """Raise if the call is invalid. All ranks raise, because they get the same arguments.

        ``inputs`` are the dtypes and shapes of the inputs, by rank.
        """

    @abstractmethod
    def communicate(self, xs: tuple[Any, ...]) -> Sequence[Any] | None:
        """Return the output arrays for input arrays, or None on a rank without outputs."""

    @abstractmethod
    def adjoint(self) -> Collective:
        """Return the call that sends the gradients back."""

    def join(self, make: Callable[[], Variables], delegate: Any = None) -> Variables:
        """Call the function on all ranks together; return the outputs, or a delegate.

        ``make`` returns the inputs; if it raises, every rank raises. ``delegate`` stands in for
        the inputs of a rank that has none.
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
        """Send gradients back; those of unused outputs are zeros."""
        adjoint = self.adjoint()
        if self.gets:
            gxs = adjoint.join(lambda: or_zeros(gys, self._outputs))
        else:
            gxs = adjoint.join(tuple, gys[0])
        return (*gxs, *(None,) * (len(self.inputs) - len(gxs)))


class Rooted(Collective):
    """A collective call in which one rank, the root, plays a different part."""

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
    """Every rank gets one array from each rank. Its backward is `ReduceScatter`."""

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
    """Collect the variables of all ranks on every rank.

    In backward, each rank gets the sum of the gradients that all ranks have for its variable.

    Parameters
    ----------
    comm : CommunicatorBase
        Communicator of the ranks.
    x : chainer.Variable or ndarray
        Variable of this rank. Ranks may pass different shapes, but must pass the same dtype.

    Returns
    -------
    tuple of chainer.Variable
        One variable per rank. Every rank must run backward through at least one of them.

    Raises
    ------
    TypeError, ValueError
        On every rank, if any rank passes anything else, or if dtypes differ.
    RuntimeError
        On every rank, if the ranks call different functions, or if one rank needs a gradient
        and another records no graph (``chainer.no_backprop_mode``).

    Examples
    --------
    >>> x = chainer.Variable(np.float32([comm.rank + 1]))
    >>> y = F.concat(chainermn.functions.allgather(comm, x), axis=0)
    >>> y.array
    array([1., 2.], dtype=float32)
    >>> F.sum(y * y).backward()
    >>> x.grad  # the losses of both ranks depend on x
    array([4.], dtype=float32)
    array([8.], dtype=float32)
    """
    return AllGather(comm).join(lambda: (as_variable(x),))


def reduce_scatter(comm: CommunicatorBase, xs: Sequence[chainer.Variable]) -> chainer.Variable:
    """Add up ``xs[i]`` of all ranks, and return the sum on rank ``i``.

    Backward gives every rank the gradients of all sums, as :func:`allgather` does.

    Parameters
    ----------
    comm : CommunicatorBase
        Communicator of the ranks.
    xs : sequence of (chainer.Variable or ndarray), or one of shape (comm.size, ...)
        One entry per rank, all with the same dtype. Entry ``i`` has the same shape on every rank;
        different entries may have different shapes.

    Returns
    -------
    chainer.Variable
        Sum with the shape and dtype of ``xs[rank]``. float16 values are added up in float32. A
        sum beyond the range of the dtype is infinite, or wraps around if it is an integer: cast
        first.

    Raises
    ------
    TypeError, ValueError
        On every rank, if any rank passes anything else, or if shapes or dtypes differ.
    RuntimeError
        On every rank, for the reasons of :func:`allgather`.

    Examples
    --------
    >>> x = np.float32([[1, 2], [10, 20]])  # a row per rank
    >>> chainermn.functions.reduce_scatter(comm, x).array
    array([2., 4.], dtype=float32)
    array([20., 40.], dtype=float32)
    """
    return ReduceScatter(comm).join(lambda: _one_each(comm, xs))[0]


def alltoall(
    comm: CommunicatorBase, xs: Sequence[chainer.Variable]
) -> tuple[chainer.Variable, ...]:
    """Send ``xs[i]`` to rank ``i``, from every rank to every rank.

    Backward sends each gradient to the rank that its variable came from.

    Parameters
    ----------
    comm : CommunicatorBase
        Communicator of the ranks.
    xs : sequence of (chainer.Variable or ndarray), or one of shape (comm.size, ...)
        One entry per rank. Shapes may differ, dtypes must not.

    Returns
    -------
    tuple of chainer.Variable
        One variable per rank: entry ``i`` comes from rank ``i``. Every rank must run backward
        through at least one of them.

    Raises
    ------
    TypeError, ValueError
        On every rank, if any rank passes anything else, or not one entry per rank.
    RuntimeError
        On every rank, for the reasons of :func:`allgather`.

    Examples
    --------
    >>> xs = [np.float32([10 * comm.rank]), np.float32([10 * comm.rank + 1])]
    >>> [y.item() for y in chainermn.functions.alltoall(comm, xs)]
    [0.0, 10.0]
    [1.0, 11.0]
    """
    return AllToAll(comm).join(lambda: _one_each(comm, xs))


def allreduce(
    comm: CommunicatorBase, x: chainer.Variable, op: Literal["sum", "mean"] = "sum"
) -> chainer.Variable:
    """Return the sum, or the mean, of the variables of all ranks on every rank.

    Backward reduces the gradients in the same way. They are the derivatives of the sum of the
    losses of all ranks.

    Parameters
    ----------
    comm : CommunicatorBase
        Communicator of the ranks.
    x : chainer.Variable or ndarray
        Variable with the same shape and dtype on every rank.
    op : {'sum', 'mean'}
        Operation.

    Returns
    -------
    chainer.Variable
        Sum or mean, the same on every rank. float16 values are added up in float32. A sum beyond
        the range of the dtype is infinite, or wraps around if it is an integer: cast first. Every
        rank must run backward through it.

    Raises
    ------
    TypeError, ValueError
        On every rank, if any rank passes anything else, or if shapes, dtypes or ``op`` differ.
    RuntimeError
        On every rank, for the reasons of :func:`allgather`.

    Examples
    --------
    >>> x = chainer.Variable(np.float32([1, comm.rank]))
    >>> y = chainermn.functions.allreduce(comm, x)
    >>> y.array
    array([2., 1.], dtype=float32)
    >>> F.sum(y).backward()
    >>> x.grad  # the losses of both ranks depend on x
    array([2., 2.], dtype=float32)
    """
    return AllReduce(comm, op).join(lambda: (as_variable(x),))[0]


def bcast(comm: CommunicatorBase, x: chainer.Variable | None, root: int = 0) -> chainer.Variable:
    """Broadcast: give every rank the variable of the root.

    Backward adds up the gradients of all ranks on the root.

    Parameters
    ----------
    comm : CommunicatorBase
        Communicator of the ranks.
    x : chainer.Variable or ndarray
        Variable to send; only that of the root is used.
    root : int
        Rank that sends.

    Returns
    -------
    chainer.Variable
        Variable of the root. Every rank must run backward through it.

    Raises
    ------
    TypeError, ValueError
        On every rank, if the root passes anything else, or if ``root`` is not a rank.
    RuntimeError
        On every rank, for the reasons of :func:`allgather`. Calls with different roots count as
        different functions.

    Examples
    --------
    >>> x = chainer.Variable(np.float32([1, 2])) if comm.rank == 0 else None
    >>> y = chainermn.functions.bcast(comm, x)
    >>> y.array
    array([1., 2.], dtype=float32)
    >>> F.sum(y).backward()
    >>> if comm.rank == 0:
    ...     print(x.grad)
    [2. 2.]
    """
    return Bcast(comm, root).join(lambda: (as_variable(x),))[0]


def gather(
    comm: CommunicatorBase, x: chainer.Variable, root: int = 0
) -> tuple[chainer.Variable, ...] | chainer.Variable:
    """Collect the variables of all ranks on the root.

    Backward scatters the gradients from the root.

    Parameters
    ----------
    comm : CommunicatorBase
        Communicator of the ranks.
    x : chainer.Variable or ndarray
        Variable of this rank. Ranks may pass different shapes, but must pass the same dtype.
    root : int
        Rank that receives.

    Returns
    -------
    tuple of chainer.Variable, or chainer.Variable
        On the root, a tuple with one variable per rank. On other ranks, a delegate variable:
        float32 with shape ``(0,)``. Run backward from it, or connect it to a loss with
        :func:`pseudo_connect`.

    Raises
    ------
    TypeError, ValueError
        On every rank, if any rank passes anything else, if dtypes differ, or if ``root`` is not
        a rank.
    RuntimeError
        On every rank, for the reasons of :func:`bcast`.

    Examples
    --------
    >>> x = chainer.Variable(np.float32([comm.rank + 1]))
    >>> y = chainermn.functions.gather(comm, x)
    >>> loss = F.sum(F.concat(y, axis=0) ** 2) if comm.rank == 0 else y
    >>> loss.backward()
    >>> x.grad
    array([2.], dtype=float32)
    array([4.], dtype=float32)
    """
    gathered = Gather(comm, root).join(lambda: (as_variable(x),))
    return gathered if comm.rank == root else gathered[0]


def scatter(
    comm: CommunicatorBase, xs: Sequence[chainer.Variable] | None, root: int = 0
) -> chainer.Variable:
    """Send variable ``xs[i]`` of the root to rank ``i``.

    Backward gathers the gradients on the root.

    Parameters
    ----------
    comm : CommunicatorBase
        Communicator of the ranks.
    xs : sequence of (chainer.Variable or ndarray), or one of shape (comm.size, ...)
        One entry per rank; only those of the root are used. Shapes may differ, dtypes must not.
    root : int
        Rank that sends.

    Returns
    -------
    chainer.Variable
        Variable for this rank. Every rank must run backward through it.

    Raises
    ------
    TypeError, ValueError
        On every rank, if the root passes anything else, or not one entry per rank, or if
        ``root`` is not a rank.
    RuntimeError
        On every rank, for the reasons of :func:`bcast`.

    Examples
    --------
    >>> xs = chainer.Variable(np.float32([[1, 2], [3, 4]])) if comm.rank == 0 else None
    >>> y = chainermn.functions.scatter(comm, xs)
    >>> y.array
    array([1., 2.], dtype=float32)
    array([3., 4.], dtype=float32)
    """
    return Scatter(comm, root).join(lambda: _one_each(comm, xs))[0]


def _one_each(comm: CommunicatorBase, xs: Any) -> Variables:
    """Return the entries of a sequence or an array: one per rank, all with one dtype."""
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
            "same order. In backward, the order follows from the depth of the graph: control it "
            "with pseudo_connect"
        )
    needing = [rank for rank, ballot in enumerate(ballots) if ballot.gradient]
    silent = [rank for rank, ballot in enumerate(ballots) if not ballot.recording]
    if needing and silent:
        raise RuntimeError(
            f"{calls[0]}: rank {needing[0]} needs a gradient, but rank {silent[0]} records no "
            "graph (chainer.config.enable_backprop is off there) and would never reach backward; "
            "set it to the same value on all ranks"
        )
