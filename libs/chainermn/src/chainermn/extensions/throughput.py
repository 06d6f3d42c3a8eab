"""How fast training goes, and how long it still takes."""

from __future__ import annotations

import time
from typing import Any

import chainer
import numpy as np
from chainer.training.extension import PRIORITY_EDITOR, Extension


class Throughput(Extension):
    """Reports how much is trained with in a second, and how many minutes are left.

    Reported as ``{what}/s`` and ``minutes left``, once per interval of the trigger. The speed is
    that of the steps alone: their forward and backward, the exchange and the wait for the next
    batch, but neither evaluation nor snapshots. The minutes left are those of everything, at the
    pace so far; they are not reported if the trainer's stop trigger does not know its length.

    Use it where the log is kept: ``if comm.rank == 0: trainer.extend(Throughput('images',
    args.batchsize, comm.size))``.

    Parameters
    ----------
    what : str
        The plural of what is counted.
    of_a_step : float or str
        How many of them a rank has in a step, or the name of an observation that says so.
    n_ranks : int
        Ranks that have as many.
    """

    trigger = 1, "epoch"
    priority = PRIORITY_EDITOR  # after evaluators, before LogReport

    def __init__(self, what: str, of_a_step: float | str, n_ranks: int = 1) -> None:
        self.what, self.of_a_step, self.n_ranks = what, of_a_step, n_ranks
        self._count = self._seconds = 0.0

    def initialize(self, trainer: chainer.training.Trainer) -> None:
        """Measure the steps from now on."""
        updater = trainer.updater
        update = updater.update

        def timed() -> None:
            start = time.perf_counter()
            update()
            self._seconds += time.perf_counter() - start
            self._count += self._of_this_step(trainer.observation)

        updater.update = timed

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        """Report on the interval that ends."""
        if found := self.speed():
            if (left := minutes_left(trainer)) is not None:
                found["minutes left"] = left
            chainer.report(found)
        self._count = self._seconds = 0.0

    def speed(self) -> dict[str, float]:
        """Return ``{what}/s`` of the interval so far; nothing before its first step."""
        if not self._seconds:
            return {}
        return {f"{self.what}/s": self.n_ranks * self._count / self._seconds}

    def serialize(self, serializer: chainer.AbstractSerializer) -> None:
        """Load or save what has been measured of the interval."""
        self._count = float(serializer("count", np.float64(self._count)))
        self._seconds = float(serializer("seconds", np.float64(self._seconds)))

    def _of_this_step(self, observation: dict[str, Any]) -> float:
        if isinstance(self.of_a_step, str):
            value = observation[self.of_a_step]
            return float(getattr(value, "array", value))
        return self.of_a_step


def share_done(trainer: chainer.training.Trainer) -> float | None:
    """Return how much of the training is done, from 0 to 1; None if its length is unknown."""
    length_of = getattr(trainer.stop_trigger, "get_training_length", None)
    if length_of is None:
        return None
    length, unit = length_of()
    updater = trainer.updater
    return float(min((updater.epoch_detail if unit == "epoch" else updater.iteration) / length, 1))


def minutes_left(trainer: chainer.training.Trainer) -> float | None:
    """Return how long the training still takes, at the pace so far; None if that is unknown."""
    done = share_done(trainer)
    return trainer.elapsed_time * (1 / done - 1) / 60 if done else None
