"""Run an unchanged app, measure its iterations, and pause it between turns."""

from __future__ import annotations

import contextlib
import functools
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chainer.training import Trainer

from benchmarks.ranks.orders import Orders, rank_and_size

APPS = Path(__file__).resolve().parents[2] / "apps"


def run(orders: Orders) -> None:
    waiting = iter(orders)
    first = next(waiting)
    name, arguments = first["options"]["app"], first["options"]["arguments"]
    folder = APPS / name
    sys.path.insert(0, str(folder))
    script = str(folder / "train.py")
    clock = Clock(orders, first["repeat"])
    run_trainer = Trainer.run

    def measured(trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        trainer.updater.update = clock.around(trainer.updater.update)
        run_trainer(trainer, *args, **kwargs)

    Trainer.run = measured
    os.environ["MPLBACKEND"] = "Agg"
    # In the folder of an earlier run, the app would resume that run.
    with tempfile.TemporaryDirectory() as out, contextlib.suppress(Enough):
        sys.argv = [script, *arguments, "--out", out]
        runpy.run_path(script, run_name="__main__")


class Enough(BaseException):
    """Ends the app."""


class Clock:
    """Counts iterations and waits for orders between turns.

    Only the iterations of rank 0 count. Rank 0 does most of the work between iterations, such as
    validation and snapshots, while the others wait for it in their next iteration.
    """

    def __init__(self, orders: Orders, iterations: int) -> None:
        self._orders = orders
        self._iterations = self._left = iterations
        self._seconds = 0.0

    def around(self, update: Callable[[], None]) -> Callable[[], None]:
        @functools.wraps(update)
        def measured() -> None:
            if self._left == 0:
                self._wait()
            start = time.perf_counter()
            update()
            self._seconds += time.perf_counter() - start
            self._left -= 1
            if self._left == 0:
                counts = rank_and_size()[0] == 0
                self._orders.answer({"seconds": counts * self._seconds / self._iterations})

        return measured

    def _wait(self) -> None:
        order = next(iter(self._orders), None)
        if order is None:
            raise Enough
        self._iterations = self._left = order["repeat"]
        self._seconds = 0.0
