"""Running statistics averaged over the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import chainer
from chainer.training.extension import PRIORITY_WRITER, Extension

if TYPE_CHECKING:
    from chainermn.communicators.communicator_base import CommunicatorBase


class AllreducePersistent(Extension):
    """Replaces persistent arrays of a model by their means over the ranks.

    The statistics of ``BatchNormalization`` come from the batches of each rank alone, so each
    rank's model would give other results in test mode. This extension runs before evaluators
    and snapshots.

    Parameters
    ----------
    model : chainer.Link
        Its persistent arrays of floats are averaged in place; other persistent values, such as
        counters, stay as they are.
    comm : CommunicatorBase
    """

    trigger = 1, "epoch"
    priority = PRIORITY_WRITER + 1

    def __init__(self, model: chainer.Link, comm: CommunicatorBase) -> None:
        self.model = model
        self.comm = comm

    def __call__(self, trainer: chainer.training.Trainer | None = None) -> None:
        """Average. Every rank must call it.

        Raises
        ------
        ValueError
            On every rank, if the models have different persistent arrays.
        """
        named = dict(_named_float_persistents(self.model))
        described = [(name, value.shape, value.dtype.name) for name, value in named.items()]
        everywhere = self.comm.allgather_obj(described)
        for rank, other in enumerate(everywhere):
            if other != everywhere[0]:
                differing = sorted(set(other) ^ set(everywhere[0]))
                raise ValueError(
                    "AllreducePersistent: the models must have the same persistent arrays on all "
                    f"ranks, but those of rank 0 and rank {rank} differ in {differing}"
                )
        if named:
            means = self.comm.allreduce(tuple(named.values()), "mean")
            for value, mean in zip(named.values(), means, strict=True):
                value[...] = mean


def _named_float_persistents(model: chainer.Link) -> Iterator[tuple[str, Any]]:
    for prefix, link in sorted(model.namedlinks(), key=lambda pair: pair[0]):
        for name in sorted(link._persistent):
            value = link.__dict__[name]
            if isinstance(value, chainer.get_array_types()) and value.dtype.kind == "f":
                yield f"{prefix}/{name}", value
