"""Persistent values of a model: their names, their values, and how all ranks get those of rank 0.

Chainer saves and loads persistent values with a model, but no optimizer updates them: the running
statistics of batch normalization, for example.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import chainer
from chainer.link_hooks import SpectralNormalization

from chainermn.agreement import Ranks, run_on_root, run_together


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
    ranks: Ranks, model: chainer.Link, where: str = "bcast_data", *, following_only: bool = False
) -> None:
    """Give the models of all ranks the persistent values of rank 0. Collective.

    Values that are None on rank 0 do not change. Arrays change in place if shape and dtype are
    equal.

    Parameters
    ----------
    ranks : CommunicatorBase
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

    def own() -> dict[str, Persistent]:
        found = persistents_of(model)
        return {each.path: each for each in found if each.follows_rank_0 or not following_only}

    values = run_on_root(ranks, 0, where, lambda: {n: each.value for n, each in own().items()})

    def take_over() -> None:
        here = own()
        if unlike := sorted(here.keys() ^ values.keys()):
            raise ValueError(
                "the model must have the same persistent values on all ranks, but only rank 0 or "
                f"only this one has {', '.join(unlike)}"
            )
        for name, value in values.items() if ranks.rank else ():
            if value is not None:
                here[name].set(value)

    run_together(ranks, where, take_over)
