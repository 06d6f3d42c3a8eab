"""Record what every rank does."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import chainer
from chainer.training.extension import Extension

from chainermn.arguments import check_communicator
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.observation.settings import Settings
from chainermn.observation.timeline_file import TimelineFile


class Timeline(Extension):
    """Records what every rank does, and writes it into one file when training ends.

    The file is in the Trace Event Format: https://ui.perfetto.dev shows it, with a process for
    each rank and a track for each thread; ``chainermn report`` sums it up. The variable
    ``CHAINERMN_TIMELINE=FILE`` does the same for a script without this extension.

    Recorded are, for each iteration, the wait for the batch and its conversion, forward, backward,
    each bucket's way through the exchange, the wait for other ranks, the optimizer's step,
    extensions, evaluation and checkpoints. A rank keeps its latest 50,000 spans.

    Use it on every rank: ``trainer.extend(Timeline(comm))``. If an exception ends training,
    nothing is written.

    Parameters
    ----------
    comm : CommunicatorBase
        Its ranks are recorded.
    filename : path
        In the trainer's folder; compressed if it ends with ``.gz``.
    layers : bool
        Whether to record each link's forward and each function's backward. This costs some
        microseconds each.
    iterations : (int, int), optional
        The first and the last iteration to record; all by default.

    Raises
    ------
    OSError
        On every rank, when training begins, if the file cannot be written.
    ValueError
        If the iterations are not a first and a last one.
    """

    trigger = None  # it has nothing to do while training goes on
    priority = -1000  # after everything else

    def __init__(
        self,
        comm: CommunicatorBase,
        filename: str | os.PathLike[str] = "timeline.json",
        *,
        layers: bool = False,
        iterations: tuple[int, int] | None = None,
    ) -> None:
        check_communicator("Timeline(comm)", comm, filename)
        self.comm, self.filename = comm, filename
        self._settings = Settings(str(filename), layers, iterations)
        self._file: TimelineFile | None = None
        self._has_failed = False

    def initialize(self, trainer: chainer.training.Trainer) -> None:
        """Begin to record."""
        settings = replace(self._settings, path=str(Path(trainer.out, self.filename)))
        self._has_failed = False
        self._file = TimelineFile(self.comm.mpi_comm, settings, "Timeline")
        self._file.observe(trainer)

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        """Do nothing."""

    def on_error(self, trainer: chainer.training.Trainer, exc: Exception, tb: Any) -> None:
        """Note that an exception ends training."""
        self._has_failed = True

    def finalize(self) -> None:
        """Write the file, unless an exception ends training."""
        if self._file is None:
            return
        # Chainer calls on_error for exceptions, but not for an interrupt.
        error = sys.exc_info()[0]
        is_ended = error is not None and not issubclass(error, Exception)
        if self._has_failed or is_ended:
            self._file.discard()
        else:
            self._file.write()
        self._file = None
