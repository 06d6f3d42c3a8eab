"""Persistent values of a model: their names, their values, and how all ranks get those of rank 0.

Chainer saves and loads persistent values with a model, but no optimizer updates them: the running
statistics of batch normalization, for example.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol

import chainer
from chainer.link_hooks import SpectralNormalization

from chainermn.agreement import InputError, attempt, raise_errors_of
from chainermn.transport.gpu.device import on_gpu


class Communicator(Protocol):
    """The methods of a communicator that `bcast_persistents` uses."""

    @property
    def rank(self) -> int:
        """Number of this process among all ranks, from 0."""

    def allgather_obj(self, obj: Any) -> list[Any]:
        """Collect the objects of all ranks on every rank."""

    def bcast_obj(self, obj: Any, max_buf_len: int | None = None, root: int = 0) -> Any:
        """Give every rank the object of the root."""

    def bcast(self, x: Any, root: int = 0) -> Any:
        """Give every rank the arrays of the root."""


class Persistent(NamedTuple):
    """A persistent value of a model.

    Attributes
    ----------
    path : str
        Path of the link in the model, and name of the value, such as ``"/norm/avg_mean"``.
    link : chainer.Link
        Link that has the value.
    name : str
        Name of the link's attribute.
    follows_rank_0 : bool
        Whether all ranks should have the value of rank 0, see `names_following_rank_0`.
    """

    path: str
    link: chainer.Link
    name: str
    follows_rank_0: bool

    @property
    def value(self) -> Any:
        """An array, a number, or anything else; None if it is not initialized."""
        return getattr(self.link, self.name, None)

    def set(self, new: Any) -> None:
        """Change the value: an array of the same kind, shape and dtype in place."""
        old = self.value
        if isinstance(new, chainer.get_array_types()):
            if type(new) is type(old) and (new.shape, new.dtype) == (old.shape, old.dtype):
                old[...] = new
                return
            new = self.link.device.send(new)
        setattr(self.link, self.name, new)
        self.link.register_persistent(self.name)


def persistents_of(model: chainer.Link) -> list[Persistent]:
    """Return the persistent values of a model, sorted by path, each once.

    A link that occurs twice in the model counts under the first of its paths. Values that
    ``SpectralNormalization`` registers only in the first forward pass are there before, as None.

    Raises
    ------
    TypeError
        If ``model`` is not a link.
    ValueError
        If ``follow_rank_0`` of a link has a name that is not one of its persistent values.
    """
    if not isinstance(model, chainer.Link):
        raise TypeError(f"expected a model, which is a chainer.Link, got {type(model)}")
    links: dict[int, tuple[str, chainer.Link]] = {}
    for path, link in sorted(model.namedlinks(), key=lambda pair: pair[0]):
        links.setdefault(id(link), (path.rstrip("/"), link))
    persistents = []
    for path, link in links.values():
        following = names_following_rank_0(link)
        persistents += [
            Persistent(f"{path}/{name}", link, name, name in following)
            for name in persistent_names(link) | following
        ]
    return sorted(persistents, key=lambda each: each.path)


def named_persistents(model: chainer.Link) -> list[tuple[str, Any]]:
    """Return the names and values of `persistents_of` a model."""
    return [(persistent.path, persistent.value) for persistent in persistents_of(model)]


def persistent_names(link: chainer.Link) -> set[str]:
    """Return the names of the persistent values of one link, without those of its children."""
    names: set[str] = link._persistent  # Chainer has no public name for it
    return set(names)


def names_following_rank_0(link: chainer.Link) -> set[str]:
    """Return the names of a link's persistent values that all ranks should have from rank 0.

    These are the vectors that ``SpectralNormalization`` registers, because ranks may have the
    same singular vector with opposite signs, whose mean is 0; and those that the link's own
    attribute ``follow_rank_0`` names.

    Raises
    ------
    ValueError
        If ``follow_rank_0`` has a name that is not one of the persistent values of the link.
    """
    named: str | Iterable[str] = getattr(link, "follow_rank_0", ())
    following = {named} if isinstance(named, str) else set(named)
    if unknown := following - persistent_names(link):
        raise ValueError(
            f"follow_rank_0 of {type(link).__name__} names {sorted(unknown)}, but its persistent "
            f"values are {sorted(persistent_names(link))}. Correct the name, or register the "
            "value when the link is created, as None if it is not known yet"
        )
    hooks = link.local_link_hooks.values()
    return following | {
        hook.vector_name for hook in hooks if isinstance(hook, SpectralNormalization)
    }


def bcast_persistents(
    communicator: Communicator,
    model: chainer.Link,
    where: str = "bcast_data",
    *,
    following_only: bool = False,
) -> None:
    """Give the models of all ranks the persistent values of rank 0. Collective.

    A value that is None on rank 0 comes from the lowest rank that has it. Arrays change in place
    if shape and dtype are equal, and stay in GPU memory if they are there.

    Parameters
    ----------
    communicator : CommunicatorBase
        Communicator of the ranks.
    model : chainer.Link
        Model with persistent values of the same names on every rank.
    where : str
        Name of the function that the user called, for error messages.
    following_only : bool
        Whether to leave other values alone than those of `names_following_rank_0`.

    Raises
    ------
    TypeError, ValueError
        On every rank, if a rank does not give a model, if the names differ between ranks, or if
        a value cannot be pickled.
    """
    found = attempt(lambda: persistents_of(model))
    own = [] if isinstance(found, InputError) else found
    own = [each for each in own if each.follows_rank_0 or not following_only]
    everywhere = communicator.allgather_obj(
        found if isinstance(found, InputError) else [_describe(each) for each in own]
    )
    raise_errors_of(dict(enumerate(everywhere)), where)
    groups: dict[tuple[int, bool], list[Persistent]] = {}
    for index, described in enumerate(zip_longest(*everywhere)):
        if len({each and each.path for each in described}) > 1:
            shown = "; ".join(
                f"rank {rank}: {each.path if each else 'no further value'}"
                for rank, each in enumerate(described)
            )
            raise ValueError(
                f"{where}: the model must have the same persistent values on all ranks; "
                f"the first difference is {shown}"
            )
        root = next((rank for rank, each in enumerate(described) if each.is_set), None)
        if root is not None:
            groups.setdefault((root, described[root].on_gpu), []).append(own[index])
    for (root, is_on_gpu), persistents in groups.items():
        bcast = communicator.bcast if is_on_gpu else communicator.bcast_obj
        values = bcast(tuple(each.value for each in persistents), root=root)
        if communicator.rank != root:
            for persistent, value in zip(persistents, values, strict=True):
                persistent.set(value)


class _Description(NamedTuple):
    path: str
    is_set: bool
    on_gpu: bool


def _describe(persistent: Persistent) -> _Description:
    value = persistent.value
    return _Description(persistent.path, value is not None, on_gpu(value))
