"""Random numbers of a step that depend on nothing but a seed, the rank and the iteration."""

from __future__ import annotations

import chainer
import numpy as np
from chainer.training.extension import Extension

from chainermn.arguments import check_communicator
from chainermn.communicators.communicator_base import CommunicatorBase


class StepSeed(Extension):
    """Seeds the random generators of NumPy and CuPy before every step.

    So each rank drops out units of its own, and a run that goes on from a snapshot drops out the
    same units as one that was never interrupted, in host and in GPU memory.

    Use it on every rank: ``trainer.extend(StepSeed(args.seed, comm))``.

    Parameters
    ----------
    seed : int
        Not negative.
    comm : CommunicatorBase

    Notes
    -----
    Examples must then be shuffled by something else than NumPy's global generator, such as
    `create_distributed_sampler`: an iterator that uses it would shuffle the examples of each rank
    in another order, and snapshots for several ranks hold only one.
    """

    trigger = 1, "iteration"
    priority = -1000  # after all that may draw numbers between two steps

    def __init__(self, seed: int, comm: CommunicatorBase) -> None:
        check_communicator("StepSeed(seed, comm)", comm, seed)
        self.seed, self.rank = seed, comm.rank

    def initialize(self, trainer: chainer.training.Trainer) -> None:
        """Seed the first step, also after resuming."""
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
