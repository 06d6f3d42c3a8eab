"""The interface that the rest of the library, and its users, are written against."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, cast

import numpy as np

from chainermn.agreement import InputError, check_equal
from chainermn.communicators.configuration import Configurable
from chainermn.communicators.messages import Arrays, describe_array
from chainermn.transport.reducer import Array

if TYPE_CHECKING:
    from typing import Self

    import chainer
    from mpi4py import MPI

    from chainermn.compression.compression import Compression
    from chainermn.gradients.background import BackgroundExchange
    from chainermn.gradients.compressor import Compressor
    from chainermn.gradients.overlap.exchange import OverlappedExchange
    from chainermn.transport.host.mpi import Op


class CommunicatorBase(Configurable, ABC):
    """A group of ranks that exchange arrays, objects and the state of models.

    All methods except the point-to-point ones (``send``, ``recv``, ``send_obj``, ``recv_obj``) are
    collective: every rank calls them, in the same order.

    Arrays are of NumPy or CuPy and hold numbers or bool, in any shape. Objects can be pickled.

    Raises
    ------
    TypeError
        From every method, if an argument is something else: on both ranks of a point-to-point
        call, on every rank of a collective one.
    ValueError
        On every rank, if a sequence has another number of entries than there are ranks, ``root``
        is not the same rank everywhere, or the ranks disagree where they must give the same.
    """

    #: Whether arrays travel by NCCL.
    uses_nccl: ClassVar[bool] = False

    #: The MPI communicator underneath, for your own MPI code.
    mpi_comm: MPI.Intracomm

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a communicator belongs to the process that made it: call "
            "chainermn.create_communicator() inside the function, or in the other process"
        )

    # ---- where this rank stands ----

    @property
    @abstractmethod
    def rank(self) -> int:
        """Number of this process, from 0."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of ranks."""

    @property
    @abstractmethod
    def intra_rank(self) -> int:
        """Position of this rank among the ranks of its host, from 0."""

    @property
    @abstractmethod
    def intra_size(self) -> int:
        """Number of ranks on this host."""

    @property
    @abstractmethod
    def inter_rank(self) -> int:
        """Number of this host, from 0."""

    @property
    @abstractmethod
    def inter_size(self) -> int:
        """Number of hosts."""

    @abstractmethod
    def split(self, color: int, key: int) -> Self:
        """Divide the ranks into groups with a communicator each.

        Parameters
        ----------
        color : int
            Ranks that give the same number form a group; not negative.
        key : int
            The ranks of a group are numbered in the order of their keys.

        Returns
        -------
        CommunicatorBase
            Of the same class and configuration, over the ranks of this rank's group.
        """

    def finalize(self) -> None:
        """Release what the communicator holds. It cannot be used afterwards."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # After an error the other ranks may never come to a collective clean-up.
        if error is None:
            self.finalize()

    # ---- arrays ----

    @property
    def over_mpi(self) -> CommunicatorBase:
        """The communicator of the same ranks whose arrays travel by MPI; mostly this one."""
        return self

    @abstractmethod
    def send(self, data: Arrays, dest: int, tag: int = 0) -> None:
        """Send an array, or several, to rank ``dest``, which calls :meth:`recv`.

        Parameters
        ----------
        data : ndarray, or tuple or list of ndarray
        dest : int
        tag : int
        """

    @abstractmethod
    def recv(self, source: int, tag: int = 0) -> Arrays:
        """Return what rank ``source`` sends by :meth:`send`.

        Returns
        -------
        ndarray or tuple of ndarray
            As it was sent; a list arrives as a tuple, as from all methods.
        """

    @abstractmethod
    def bcast(self, x: Arrays | None, root: int = 0) -> Arrays:
        """Give every rank the array, or the arrays, of rank ``root``.

        Parameters
        ----------
        x : ndarray, or tuple or list of ndarray
            What ``root`` gives; ignored elsewhere.
        root : int

        Returns
        -------
        ndarray or tuple of ndarray
            On ``root``, ``x`` itself; a tuple of its arrays, if it is a list.
        """

    @abstractmethod
    def gather(self, x: Arrays, root: int = 0) -> tuple[Arrays, ...] | None:
        """Bring the arrays of all ranks to ``root``.

        Parameters
        ----------
        x : ndarray, or tuple or list of ndarray
            Shapes may differ from rank to rank, dtypes may not.
        root : int

        Returns
        -------
        tuple or None
            On ``root`` one entry per rank, elsewhere None.
        """

    @abstractmethod
    def allgather(self, x: Arrays) -> tuple[Arrays, ...]:
        """Give every rank the arrays of all ranks; otherwise as :meth:`gather`."""

    @abstractmethod
    def scatter(self, xs: Sequence[Arrays] | Array | None, root: int = 0) -> Arrays:
        """Give rank ``i`` the entry ``xs[i]`` of rank ``root``.

        Parameters
        ----------
        xs : sequence of (ndarray, or tuple or list of ndarray), or ndarray of shape (size, ...)
            What ``root`` gives; ignored elsewhere. Shapes may differ from entry to entry.
        root : int

        Returns
        -------
        ndarray or tuple of ndarray
        """

    @abstractmethod
    def alltoall(self, xs: Sequence[Array]) -> tuple[Array, ...]:
        """Send ``xs[i]`` to rank ``i``, for every ``i``.

        Parameters
        ----------
        xs : sequence of ndarray
            One entry per rank. Shapes may differ, dtypes may not.

        Returns
        -------
        tuple of ndarray
            Entry ``i`` is what rank ``i`` sent here.
        """

    @abstractmethod
    def allreduce(self, x: Arrays, op: Op = "sum") -> Arrays:
        """Combine the arrays of all ranks, element by element.

        Parameters
        ----------
        x : ndarray, or tuple or list of ndarray
            Of the same shape and dtype on every rank.
        op : {'sum', 'mean', 'max', 'min', 'prod'}
            ``'mean'`` needs floats; bool takes ``'max'`` (any) and ``'min'`` (all).

        Returns
        -------
        ndarray or tuple of ndarray
            New arrays, the same on every rank; float16 is added up in float32.
        """

    def agree_to_add_up(self, like: Array, error: InputError | None, where: str) -> None:
        """Raise on every rank if a rank has an error, or another layout: before :meth:`add_up`.

        Where ``like`` is in GPU memory, the ranks ask each other only when they meet its layout
        for the first time, since they would have to wait for each other. Thereafter an error
        raises on its rank alone, and ends the job, unless it is caught.

        Parameters
        ----------
        like : ndarray
            Its shape, dtype and memory determine those of the arrays to add up.
        error : InputError, optional
            What is wrong with the input of this rank.
        where : str
            What the user called, for the message.
        """
        check_equal(self, error or describe_array(like), where)

    def add_up(self, array: Array) -> Array:
        """Return the sum of the arrays of all ranks, which may overwrite ``array``.

        Otherwise as :meth:`allreduce`, but the ranks do not ask each other about the layout, on
        which they agree by :meth:`agree_to_add_up`.
        """
        return cast(Array, self.allreduce(array))

    # ---- objects ----

    @abstractmethod
    def send_obj(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object to rank ``dest``, which calls :meth:`recv_obj`."""

    @abstractmethod
    def recv_obj(self, source: int, status: Any = None, tag: int | None = None) -> Any:
        """Return an object that rank ``source`` sends by :meth:`send_obj`.

        Parameters
        ----------
        source : int
        status : mpi4py.MPI.Status, optional
            Filled in with source and tag.
        tag : int, optional
            Any, if not given.
        """

    @abstractmethod
    def bcast_obj(self, obj: Any, max_buf_len: int | None = None, root: int = 0) -> Any:
        """Give every rank the object of rank ``root``.

        Parameters
        ----------
        obj : object
            What ``root`` gives; ignored elsewhere.
        max_buf_len : int, optional
            Accepted for scripts written for the original; messages are divided as need be.
        root : int
        """

    @abstractmethod
    def gather_obj(self, obj: Any, root: int = 0) -> list[Any] | None:
        """Bring the objects of all ranks to ``root``: a list there, None elsewhere."""

    @abstractmethod
    def allgather_obj(self, obj: Any) -> list[Any]:
        """Give every rank the list of the objects of all ranks."""

    @abstractmethod
    def scatter_obj(self, objs: Sequence[Any] | None, root: int = 0) -> Any:
        """Give rank ``i`` the object ``objs[i]`` of rank ``root``."""

    @abstractmethod
    def allreduce_obj(self, obj: Any) -> Any:
        """Add up the objects of all ranks by ``+``, in the order of the ranks."""

    # ---- models ----

    @abstractmethod
    def bcast_data(self, model: chainer.Link) -> None:
        """Give every rank's ``model`` the parameters of rank 0.

        A parameter that is not initialised on rank 0 is taken from the lowest rank on which it
        is; where it is not yet initialised it becomes so. Persistent values stay as they are.
        """

    @abstractmethod
    def multi_node_mean_grad(self, model: chainer.Link, zero_fill: bool = False) -> None:
        """Replace every gradient of ``model`` by its mean over the ranks.

        Parameters
        ----------
        model : chainer.Link
        zero_fill : bool
            Take a gradient that a rank does not have (``None``) for zeros. Otherwise a gradient
            that no rank has stays ``None``, and one that only some have is a ValueError.
        """

    def mean_grad_unless(
        self,
        flags: Sequence[bool],
        model: chainer.Link,
        zero_fill: bool = False,
        compressor: Compressor | None = None,
    ) -> Sequence[bool]:
        """Call :meth:`multi_node_mean_grad`, unless a flag is true on any rank.

        Returns for each flag whether it is true on any rank. Gradients are compressed by the
        ``compressor``, from :meth:`create_compressor` of this communicator.
        """
        found = self.any_of_each(flags)
        if not any(found):
            self.multi_node_mean_grad(model, zero_fill)
        return found

    def any_of_each(self, flags: Sequence[bool]) -> Sequence[bool]:
        """Tell for each of ``flags`` whether it is true on any rank; as many on all ranks."""
        found: Any = self.allreduce(np.array(flags, np.uint8), "max")
        return [bool(flag) for flag in found]

    def create_compressor(self, compression: Compression) -> Compressor:
        """Return what compresses the gradients of a model.

        Raises
        ------
        ValueError
            If this communicator cannot do that.
        """
        raise ValueError(
            f"{type(self).__name__} does not compress gradients; communicators of "
            "chainermn.create_communicator do"
        )

    def create_overlapped_exchange(
        self, compressor: Compressor | None = None
    ) -> OverlappedExchange:
        """Return what averages gradients while backward still computes others.

        Raises
        ------
        RuntimeError
            On every rank, if this communicator cannot do that.
        """
        raise RuntimeError(f"{type(self).__name__} does not exchange in the background")

    def create_background_exchange(self) -> BackgroundExchange:
        """Return what averages gradients while the next iteration computes.

        Raises
        ------
        RuntimeError
            On every rank, if this communicator cannot do that.
        """
        raise RuntimeError(f"{type(self).__name__} does not exchange in the background")

    def broadcast_data(self, model: chainer.Link) -> None:
        """Call :meth:`bcast_data`, under its name in ChainerMN 1.0."""
        self.bcast_data(model)

    def allreduce_grad(self, model: chainer.Link, zero_fill: bool = False) -> None:
        """Call :meth:`multi_node_mean_grad`, under its name in ChainerMN 1.0."""
        self.multi_node_mean_grad(model, zero_fill)
