"""The names of communicators that `create_communicator` accepts."""

from __future__ import annotations

from chainermn.communicators.dummy_communicator import DummyCommunicator
from chainermn.communicators.flat_communicator import FlatCommunicator
from chainermn.communicators.hierarchical_communicator import HierarchicalCommunicator
from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase
from chainermn.communicators.naive_communicator import NaiveCommunicator
from chainermn.communicators.non_cuda_aware_communicator import NonCudaAwareCommunicator
from chainermn.communicators.pure_nccl_communicator import PureNcclCommunicator
from chainermn.communicators.single_node_communicator import SingleNodeCommunicator
from chainermn.communicators.two_dimensional_communicator import TwoDimensionalCommunicator
from chainermn.transport.topology import Topology

#: The class of each communicator by its name.
classes: dict[str, type[MpiCommunicatorBase]] = {
    "dummy": DummyCommunicator,
    "flat": FlatCommunicator,
    "hierarchical": HierarchicalCommunicator,
    "naive": NaiveCommunicator,
    "non_cuda_aware": NonCudaAwareCommunicator,
    "pure_nccl": PureNcclCommunicator,
    "single_node": SingleNodeCommunicator,
    "two_dimensional": TwoDimensionalCommunicator,
}


def registered() -> dict[str, type[MpiCommunicatorBase]]:
    """Return the class of each communicator by its name, in alphabetical order.

    Examples
    --------
    >>> names = list(chainermn.communicators.registered())
    >>> names[:3]
    ['dummy', 'flat', 'hierarchical']
    """
    return dict(sorted(classes.items()))


def register(name: str, kind: type[MpiCommunicatorBase]) -> None:
    """Give your own communicator class a name, which `create_communicator` then accepts.

    Parameters
    ----------
    name : str
        Name that no other class has.
    kind : type
        Subclass of `MpiCommunicatorBase`.

    Raises
    ------
    TypeError
        If ``kind`` is not such a subclass.
    ValueError
        If another class has that name.

    Examples
    --------
    >>> class OneBucket(chainermn.communicators.MpiCommunicatorBase):
    ...     bucket_bytes = float("inf")  # all gradients in one all-reduce
    >>> chainermn.communicators.register("one_bucket", OneBucket)
    >>> type(chainermn.create_communicator("one_bucket")).__name__
    'OneBucket'
    """
    if not (isinstance(kind, type) and issubclass(kind, MpiCommunicatorBase)):
        raise TypeError(f"register: expected a subclass of MpiCommunicatorBase, got {kind!r}")
    if classes.setdefault(name, kind) is not kind:
        raise ValueError(
            f"register: the name {name!r} belongs to {classes[name].__name__}; choose another one"
        )


def default_on_cpu(topology: Topology) -> str:
    """Return the name of the communicator that sends the fewest bytes between hosts."""
    names = ("single_node", "two_dimensional", "hierarchical")
    return next(name for name in names if not classes[name].why_not(topology))


def class_named(name: str) -> type[MpiCommunicatorBase]:
    """Return the class that is registered under a name."""
    if name in classes:
        return classes[name]
    import difflib

    similar = difflib.get_close_matches(str(name), classes, n=1, cutoff=0.8)
    question = f" (did you mean {similar[0]!r}?)" if similar else ""
    known = ", ".join(registered())
    raise ValueError(f"unknown communicator {name!r}{question}; expected one of {known}")
