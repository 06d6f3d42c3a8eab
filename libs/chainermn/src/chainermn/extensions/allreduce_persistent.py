"""Average the running statistics of all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import chainer
from chainer.training.extension import PRIORITY_WRITER, Extension

from chainermn.agreement import run_together
from chainermn.communicators.communicator_base import CommunicatorBase


class AllreducePersistent(Extension):
    """Extension that replaces the persistent arrays of a model by their means over all ranks.

    Use it with ``BatchNormalization``: each rank computes its statistics from its own batches, so
    without this extension the models of the ranks differ in test mode. It runs before evaluators
    and snapshots.

    Parameters
    ----------
    model : chainer.Link
        Model whose persistent float arrays are averaged in place. Other persistent values, such
        as counters, do not change.
    comm : CommunicatorBase
        Communicator of the ranks.

    Examples
    --------
    >>> trainer.extend(chainermn.extensions.AllreducePersistent(model, comm))
    """

    trigger = 1, "epoch"
    priority = PRIORITY_WRITER + 1

    def __init__(self, model: chainer.Link, comm: CommunicatorBase) -> None:
        self.model = model
        self.comm = comm

    def __call__(self, trainer: chainer.training.Trainer | None = None) -> None:
        """Average the arrays. Every rank must call it.

        Raises ValueError on every rank if the models have different persistent arrays.
        """
        named = dict(_named_float_persistents(self.model))
        own = {(name, value.shape, value.dtype.name) for name, value in named.items()}
        expected = self.comm.bcast_obj(own)

        def check() -> None:
            if own != expected:
                raise ValueError(
                    "the models must have the same persistent arrays on all ranks, but those of "
                    f"rank 0 and rank {self.comm.rank} differ in {sorted(own ^ expected)}"
                )

        run_together(self.comm, "AllreducePersistent", check)
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
