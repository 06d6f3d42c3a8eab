"""Make the random numbers of a step depend only on a seed, the rank and the iteration."""

from __future__ import annotations

import chainer
import numpy as np
from chainer.training.extension import Extension

from chainermn.arguments import check_communicator
from chainermn.communicators.communicator_base import CommunicatorBase


class StepSeed(Extension):
    """Extension that seeds the random generators of NumPy and CuPy before every step.

    With it, dropout is different on each rank, and a resumed run drops out the same units as a
    run without interruption, on CPUs and GPUs. Use it on every rank.

    Parameters
    ----------
    seed : int
        Seed of the run, at least 0.
    comm : CommunicatorBase
        Communicator of the ranks.

    Examples
    --------
    >>> trainer.extend(chainermn.extensions.StepSeed(0, comm))
    """

    trigger = 1, "iteration"
    priority = -1000  # after all code that may draw numbers between two steps

    def __init__(self, seed: int, comm: CommunicatorBase) -> None:
        check_communicator("StepSeed(seed, comm)", comm, seed)
        self.seed, self.rank = seed, comm.rank

    def initialize(self, trainer: chainer.training.Trainer) -> None:
        """Seed the first step, also of a resumed run."""
        self(trainer)

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        """Seed the next step."""
        entropy = [self.seed, self.rank, trainer.updater.iteration]
        number = int(np.random.SeedSequence(entropy).generate_state(1)[0])
        np.random.seed(number)
        for optimizer in trainer.updater.get_all_optimizers().values():
            xp = optimizer.target.device.xp
            if xp is not np:
                xp.random.seed(number)
