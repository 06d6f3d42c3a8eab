"""The interface of all communicators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, cast

from chainermn.agreement import InputError, check_equal
from chainermn.communicators.configuration import Configurable
from chainermn.communicators.messages import Arrays, describe_array
from chainermn.transport.reducer import Array

if TYPE_CHECKING:
    from typing import Self

    import chainer
    from mpi4py import MPI

    from chainermn.transport.host.mpi import Op


class CommunicatorBase(Configurable, ABC):
    """A group of ranks that exchange arrays, objects, and the parameters and gradients of models.

    All methods are collective, except the point-to-point ones (``send``, ``recv``, ``send_obj``,
    ``recv_obj``): every rank must call them, in the same order.

    Arrays are NumPy or CuPy arrays of numbers or bool, in any shape, but not masked arrays.
    Objects are anything that can be pickled.

    Raises
    ------
    TypeError
        From every method, if an argument has the wrong type. Both ranks of a point-to-point call
        raise, and all ranks of a collective call.
    ValueError
        On every rank, if a sequence does not have one entry per rank, if ``root`` is not a rank
        or differs between ranks, or if the ranks pass different values where they must agree.

    Examples
    --------
    Each rank has a number, and so does its host:

    >>> comm.rank
    0
    1
    >>> comm.size
    2
    >>> comm.inter_rank, comm.inter_size
    (0, 1)
    >>> comm.intra_rank, comm.intra_size
    (0, 2)
    (1, 2)
    """

    #: Whether arrays are sent by NCCL.
    uses_nccl: ClassVar[bool] = False

    #: The MPI communicator of these ranks, for your own calls of mpi4py.
    mpi_comm: MPI.Intracomm

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a communicator belongs to the process that created it: call "
            "chainermn.create_communicator() inside the function, or in the other process"
        )

    # ---- where this rank stands ----

    @property
    @abstractmethod
    def rank(self) -> int:
        """Number of this process among all ranks, from 0."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of ranks."""

    @property
    @abstractmethod
    def intra_rank(self) -> int:
        """Number of this rank among the ranks of its host, from 0."""

    @property
    @abstractmethod
    def intra_size(self) -> int:
        """Number of ranks on this host."""

    @property
    @abstractmethod
    def inter_rank(self) -> int:
        """Number of this host among all hosts, from 0."""

    @property
    @abstractmethod
    def inter_size(self) -> int:
        """Number of hosts."""

    @abstractmethod
    def split(self, color: int, key: int) -> Self:
        """Divide the ranks into groups, each with its own communicator.

        Parameters
        ----------
        color : int
            Number of the group that this rank joins, at least 0.
        key : int
            Sort key: the ranks of a group are numbered in the order of their keys.

        Returns
        -------
        CommunicatorBase
            Communicator of this rank's group, with the same class and settings.

        Examples
        --------
        Put even and odd ranks into two groups:

        >>> group = comm.split(color=comm.rank % 2, key=comm.rank)
        >>> group.size
        1
        """

    def finalize(self) -> None:
        """Free the resources of this communicator, which you cannot use afterwards.

        A ``with`` block does this at its end.

        Examples
        --------
        >>> with comm.split(color=0, key=-comm.rank) as reversed_ranks:
        ...     reversed_ranks.rank
        1
        0
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # After an error, other ranks may never reach a collective clean-up.
        if error is None:
            self.finalize()

    # ---- arrays ----

    @property
    def over_mpi(self) -> CommunicatorBase:
        """A communicator of the same ranks that sends arrays by MPI; this one, if it does."""
        return self

    @abstractmethod
    def send(self, data: Arrays, dest: int, tag: int = 0) -> None:
        """Send one or several arrays to another rank, which must call :meth:`recv`.

        Parameters
        ----------
        data : ndarray, or tuple or list of ndarray
            Arrays to send, of any shapes and dtypes.
        dest : int
            Rank that receives them.
        tag : int
            Number that :meth:`recv` must give too, to tell messages apart.

        Examples
        --------
        >>> if comm.rank == 0:
        ...     comm.send(np.arange(3), dest=1)
        ... else:
        ...     comm.recv(source=0)
        array([0, 1, 2])
        """

    @abstractmethod
    def recv(self, source: int, tag: int = 0) -> Arrays:
        """Receive the arrays that another rank sends with :meth:`send`.

        Parameters
        ----------
        source : int
            Rank that sends.
        tag : int
            Number that the sender gives to :meth:`send`.

        Returns
        -------
        ndarray or tuple of ndarray
            The arrays as they were sent. With every method, a list arrives as a tuple.

        Examples
        --------
        >>> if comm.rank == 0:
        ...     comm.send((np.zeros(2), np.ones(1)), dest=1, tag=7)
        ... else:
        ...     comm.recv(source=0, tag=7)
        (array([0., 0.]), array([1.]))
        """

    @abstractmethod
    def bcast(self, x: Arrays | None, root: int = 0) -> Arrays:
        """Broadcast: give every rank the arrays of the root.

        Parameters
        ----------
        x : ndarray, or tuple or list of ndarray
            Arrays to send; only those of the root are used.
        root : int
            Rank that sends.

        Returns
        -------
        ndarray or tuple of ndarray
            The arrays of the root. On the root, this is ``x`` itself, or a tuple if ``x`` is a
            list.

        Examples
        --------
        >>> comm.bcast(np.arange(3) if comm.rank == 0 else None)
        array([0, 1, 2])
        """

    @abstractmethod
    def gather(self, x: Arrays, root: int = 0) -> tuple[Arrays, ...] | None:
        """Collect the arrays of all ranks on the root.

        Parameters
        ----------
        x : ndarray, or tuple or list of ndarray
            Arrays of this rank. Ranks may pass different shapes, but must pass the same dtypes.
        root : int
            Rank that receives.

        Returns
        -------
        tuple or None
            On the root, one entry per rank; on other ranks, None.

        Examples
        --------
        >>> arrays = comm.gather(np.array([comm.rank, 10]))
        >>> if comm.rank == 0:
        ...     print(arrays)
        (array([ 0, 10]), array([ 1, 10]))
        """

    @abstractmethod
    def allgather(self, x: Arrays) -> tuple[Arrays, ...]:
        """Collect the arrays of all ranks on every rank.

        Parameters
        ----------
        x : ndarray, or tuple or list of ndarray
            Arrays of this rank. Ranks may pass different shapes, but must pass the same dtypes.

        Returns
        -------
        tuple
            One entry per rank.

        Examples
        --------
        >>> comm.allgather(np.array([comm.rank, 10]))
        (array([ 0, 10]), array([ 1, 10]))
        """

    @abstractmethod
    def scatter(self, xs: Sequence[Arrays] | Array | None, root: int = 0) -> Arrays:
        """Send entry ``xs[i]`` of the root to rank ``i``.

        Parameters
        ----------
        xs : sequence of (ndarray, or tuple or list of ndarray), or ndarray of shape (size, ...)
            One entry per rank; only those of the root are used. Entries may have different
            shapes.
        root : int
            Rank that sends.

        Returns
        -------
        ndarray or tuple of ndarray
            The entry for this rank.

        Examples
        --------
        >>> comm.scatter([np.zeros(2), np.ones(3)] if comm.rank == 0 else None)
        array([0., 0.])
        array([1., 1., 1.])
        """

    @abstractmethod
    def alltoall(self, xs: Sequence[Array]) -> tuple[Array, ...]:
        """Send ``xs[i]`` to rank ``i``, from every rank to every rank.

        Parameters
        ----------
        xs : sequence of ndarray
            One array per rank. Shapes may differ, dtypes must not.

        Returns
        -------
        tuple of ndarray
            One array per rank: entry ``i`` comes from rank ``i``.

        Examples
        --------
        >>> comm.alltoall([np.array([comm.rank, 0]), np.array([comm.rank, 1])])
        (array([0, 0]), array([1, 0]))
        (array([0, 1]), array([1, 1]))
        """

    @abstractmethod
    def allreduce(self, x: Arrays, op: Op = "sum") -> Arrays:
        """All-reduce: combine the arrays of all ranks, element by element.

        Results that exceed the range of the dtype raise no error: integers wrap around, and
        floats become infinite, float16 beyond 65504. Cast first, for example with
        ``x.astype(np.int64)`` or ``x.astype(np.float32)``.

        Parameters
        ----------
        x : ndarray, or tuple or list of ndarray
            Arrays with the same shapes and dtypes on every rank.
        op : {'sum', 'mean', 'max', 'min', 'prod'}
            Operation. ``'mean'`` needs floats; bool allows only ``'max'`` (any) and ``'min'``
            (all).

        Returns
        -------
        ndarray or tuple of ndarray
            New arrays, the same on every rank. float16 values are added up in float32.

        Examples
        --------
        >>> x = np.array([1.0, comm.rank])
        >>> comm.allreduce(x)
        array([2., 1.])
        >>> comm.allreduce(x, op="mean")
        array([1. , 0.5])
        """

    def agree_to_add_up(self, like: Array, error: InputError | None, where: str) -> None:
        """Raise on every rank if one has an error or a different layout; call before `add_up`.

        In GPU memory, the ranks compare a layout only the first time they use it, because
        comparing makes them wait for each other. Later errors are raised only on the rank that
        has them, which ends the job unless the script catches them.

        Parameters
        ----------
        like : ndarray
            Array with the shape, dtype and memory of the arrays to add up.
        error : InputError, optional
            Error in the input of this rank.
        where : str
            Name of the function that the user called, for the message.
        """
        check_equal(self, error or describe_array(like), where)

    def add_up(self, array: Array) -> Array:
        """Return the sum of the arrays of all ranks; this may overwrite ``array``.

        Unlike :meth:`allreduce`, it does not compare the layouts on all ranks; call
        :meth:`agree_to_add_up` before.
        """
        return cast(Array, self.allreduce(array))

    # ---- objects ----

    @abstractmethod
    def send_obj(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object to another rank, which must call :meth:`recv_obj`.

        Parameters
        ----------
        obj : object
            Object to send.
        dest : int
            Rank that receives it.
        tag : int
            Number to tell messages apart, which :meth:`recv_obj` can ask for.

        Examples
        --------
        >>> if comm.rank == 0:
        ...     comm.send_obj({"epoch": 3}, dest=1)
        ... else:
        ...     comm.recv_obj(source=0)
        {'epoch': 3}
        """

    @abstractmethod
    def recv_obj(self, source: int, status: Any = None, tag: int | None = None) -> Any:
        """Receive an object that another rank sends with :meth:`send_obj`.

        Parameters
        ----------
        source : int
            Rank that sends.
        status : mpi4py.MPI.Status, optional
            Status that is filled in with the source and the tag of the message.
        tag : int, optional
            Number that the sender gives to :meth:`send_obj`. By default, any tag is accepted.

        Returns
        -------
        object
            A copy of the object.

        Examples
        --------
        >>> if comm.rank == 0:
        ...     comm.send_obj("hello", dest=1, tag=5)
        ... else:
        ...     comm.recv_obj(source=0, tag=5)
        'hello'
        """

    @abstractmethod
    def bcast_obj(self, obj: Any, max_buf_len: int | None = None, root: int = 0) -> Any:
        """Broadcast: give every rank the object of the root.

        Parameters
        ----------
        obj : object
            Object to send; only that of the root is used.
        max_buf_len : int, optional
            Ignored; accepted for scripts written for the original ChainerMN.
        root : int
            Rank that sends.

        Returns
        -------
        object
            The object of the root: itself on the root, a copy on other ranks.

        Examples
        --------
        >>> comm.bcast_obj({"lr": 0.1} if comm.rank == 0 else None)
        {'lr': 0.1}
        """

    @abstractmethod
    def gather_obj(self, obj: Any, root: int = 0) -> list[Any] | None:
        """Collect the objects of all ranks on the root.

        Parameters
        ----------
        obj : object
            Object of this rank.
        root : int
            Rank that receives.

        Returns
        -------
        list or None
            On the root, one object per rank; on other ranks, None.

        Examples
        --------
        >>> names = comm.gather_obj(f"rank {comm.rank}")
        >>> if comm.rank == 0:
        ...     print(names)
        ['rank 0', 'rank 1']
        """

    @abstractmethod
    def allgather_obj(self, obj: Any) -> list[Any]:
        """Collect the objects of all ranks on every rank.

        Parameters
        ----------
        obj : object
            Object of this rank.

        Returns
        -------
        list
            One object per rank.

        Examples
        --------
        >>> comm.allgather_obj(f"rank {comm.rank}")
        ['rank 0', 'rank 1']
        """

    @abstractmethod
    def scatter_obj(self, objs: Sequence[Any] | None, root: int = 0) -> Any:
        """Send object ``objs[i]`` of the root to rank ``i``.

        Parameters
        ----------
        objs : sequence of object
            One object per rank; only those of the root are used.
        root : int
            Rank that sends.

        Returns
        -------
        object
            The object for this rank.

        Examples
        --------
        >>> comm.scatter_obj(["train.txt", "test.txt"] if comm.rank == 0 else None)
        'train.txt'
        'test.txt'
        """

    @abstractmethod
    def allreduce_obj(self, obj: Any) -> Any:
        """Add up the objects of all ranks with ``+``, in the order of the ranks.

        Parameters
        ----------
        obj : object
            Object of this rank.

        Returns
        -------
        object
            The sum, the same on every rank.

        Examples
        --------
        >>> comm.allreduce_obj(comm.rank + 1)
        3
        >>> comm.allreduce_obj([comm.rank])
        [0, 1]
        """

    # ---- models ----

    @abstractmethod
    def bcast_data(self, model: chainer.Link, *, persistent: bool = False) -> None:
        """Give the models of all ranks the parameters of rank 0.

        A parameter that is not initialized on rank 0 comes from the lowest rank that has it.
        Afterwards it is initialized on all ranks.

        Parameters
        ----------
        model : chainer.Link
            Model with the same parameters on every rank.
        persistent : bool
            Whether to do the same with persistent values, such as the running statistics of
            batch normalization. Otherwise they do not change.

        Examples
        --------
        >>> model = L.Linear(2, 1, initialW=comm.rank, initial_bias=comm.rank)
        >>> comm.bcast_data(model)
        >>> model.W.array, model.b.array
        (array([[0., 0.]], dtype=float32), array([0.], dtype=float32))
        """

    @abstractmethod
    def multi_node_mean_grad(self, model: chainer.Link, zero_fill: bool = False) -> None:
        """Replace every gradient of a model by its mean over all ranks.

        A multi-node optimizer calls this in each iteration; see `create_multi_node_optimizer`.

        Parameters
        ----------
        model : chainer.Link
            Model with the same parameters on every rank.
        zero_fill : bool
            Whether to treat missing gradients (``None``) as zeros. Otherwise, a gradient that no
            rank has stays ``None``, and one that only some ranks have raises ValueError.

        Examples
        --------
        >>> model = L.Linear(2, 1)
        >>> model.W.grad = np.full((1, 2), comm.rank, np.float32)
        >>> comm.multi_node_mean_grad(model, zero_fill=True)
        >>> model.W.grad
        array([[0.5, 0.5]], dtype=float32)
        """

    def broadcast_data(self, model: chainer.Link) -> None:
        """Call :meth:`bcast_data` without ``persistent``; the name that ChainerMN 1.0 used.

        Examples
        --------
        >>> comm.broadcast_data(model)
        """
        self.bcast_data(model)

    def allreduce_grad(self, model: chainer.Link, zero_fill: bool = False) -> None:
        """Call :meth:`multi_node_mean_grad`; the name that ChainerMN 1.0 used.

        Examples
        --------
        >>> model.cleargrads()
        >>> comm.allreduce_grad(model, zero_fill=True)
        >>> model.predictor.b.grad
        array([0., 0., 0.], dtype=float32)
        """
        self.multi_node_mean_grad(model, zero_fill)
