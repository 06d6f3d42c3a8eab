"""Average the running statistics of all ranks."""

from __future__ import annotations

import chainer
from chainer.training.extension import PRIORITY_WRITER, Extension

from chainermn.agreement import run_together
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.gradients.persistents import bcast_persistents, persistents_of
from chainermn.optimizers.parts import is_float_array
from chainermn.optimizers.settling import optimizers_of


class AllreducePersistent(Extension):
    """Extension that replaces the persistent arrays of a model by their means over all ranks.

    Use it with ``BatchNormalization``: each rank computes its statistics from its own batches, so
    without this extension the models of the ranks differ in test mode. It runs before evaluators
    and snapshots.

    Some values have no meaningful mean: the vector that ``SpectralNormalization`` keeps is one of
    two with opposite signs. All ranks get that of rank 0 instead. Your own links can name other
    persistent values of this kind, of any type, in an attribute ``follow_rank_0``.

    Parameters
    ----------
    model : chainer.Link
        Model whose persistent float arrays are averaged in place. Other persistent values, such
        as counters, do not change, unless they follow rank 0.
    comm : CommunicatorBase
        Communicator of the ranks.

    Examples
    --------
    >>> trainer.extend(chainermn.extensions.AllreducePersistent(model, comm))

    A link whose codebook must not be averaged:

    >>> class Quantizer(chainer.Link):
    ...     follow_rank_0 = ["codes"]
    ...
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.add_persistent("codes", np.random.normal(size=(8, 2)))
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
        bcast_persistents(self.comm, self.model, "AllreducePersistent", following_only=True)
        persistents = persistents_of(self.model)
        equal = [each for each in persistents if is_float_array(each.value)]
        named = {each.path: each.value for each in equal if not each.follows_rank_0}
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
        for optimizer in optimizers_of(trainer):
            is_its_model = any(link is self.model for link in optimizer.target.links())
            if trainer is not None and optimizer.communicator is self.comm and is_its_model:
                iteration = trainer.updater.iteration
                optimizer.comparison.note_equal_persistents(equal, iteration)
