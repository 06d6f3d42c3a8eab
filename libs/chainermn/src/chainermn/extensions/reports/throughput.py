"""Measure the speed of training, and estimate the time left."""

from __future__ import annotations

import time
from typing import Any

import chainer
import numpy as np
from chainer.training.extension import PRIORITY_EDITOR, Extension


class Throughput(Extension):
    """Extension that reports the speed of training, such as images per second, and the time left.

    It reports ``{what}/s`` and ``minutes left`` whenever its trigger fires. The speed is that of
    the steps: forward, backward, exchange, and the wait for the next batch, without evaluation
    and snapshots. The minutes left include everything. They are not reported if the stop trigger
    of the trainer does not know the length of the training.

    Use it on the rank that keeps the log.

    Parameters
    ----------
    what : str
        Plural of the things to count, such as ``'images'``.
    of_a_step : float or str
        Number of these things in a step of one rank, or the name of an observed value with that
        number.
    n_ranks : int
        Number of ranks; the reported speed is that of all of them together.

    Examples
    --------
    >>> throughput = chainermn.extensions.Throughput("images", 2, comm.size)
    >>> if comm.rank == 0:
    ...     trainer.extend(throughput)
    >>> trainer.run()
    >>> if comm.rank == 0:
    ...     print(sorted(key for key in trainer.observation if key != "main/loss"))
    ['images/s', 'main/accuracy', 'minutes left']
    """

    trigger = 1, "epoch"
    priority = PRIORITY_EDITOR  # after evaluators, before LogReport

    def __init__(self, what: str, of_a_step: float | str, n_ranks: int = 1) -> None:
        self.what, self.of_a_step, self.n_ranks = what, of_a_step, n_ranks
        self._count = self._seconds = 0.0

    def initialize(self, trainer: chainer.training.Trainer) -> None:
        """Start to measure steps."""
        updater = trainer.updater
        update = updater.update

        def timed() -> None:
            start = time.perf_counter()
            update()
            self._seconds += time.perf_counter() - start
            self._count += self._of_this_step(trainer.observation)

        updater.update = timed

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        """Report the speed since the last report."""
        if found := self.speed():
            if (left := minutes_left(trainer)) is not None:
                found["minutes left"] = left
            chainer.report(found)
        self._count = self._seconds = 0.0

    def speed(self) -> dict[str, float]:
        """Return ``{what}/s`` since the last report; an empty dict before the first step."""
        if not self._seconds:
            return {}
        return {f"{self.what}/s": self.n_ranks * self._count / self._seconds}

    def serialize(self, serializer: chainer.AbstractSerializer) -> None:
        """Load or save the measurements since the last report."""
        self._count = float(serializer("count", np.float64(self._count)))
        self._seconds = float(serializer("seconds", np.float64(self._seconds)))

    def _of_this_step(self, observation: dict[str, Any]) -> float:
        if isinstance(self.of_a_step, str):
            value = observation[self.of_a_step]
            return float(getattr(value, "array", value))
        return self.of_a_step


def share_done(trainer: chainer.training.Trainer) -> float | None:
    """Return the fraction of the training that is done, from 0 to 1; None if unknown."""
    length_of = getattr(trainer.stop_trigger, "get_training_length", None)
    if length_of is None:
        return None
    length, unit = length_of()
    updater = trainer.updater
    return float(min((updater.epoch_detail if unit == "epoch" else updater.iteration) / length, 1))


def minutes_left(trainer: chainer.training.Trainer) -> float | None:
    """Return the minutes that training still takes at the speed so far; None if unknown."""
    done = share_done(trainer)
    return trainer.elapsed_time * (1 / done - 1) / 60 if done else None
