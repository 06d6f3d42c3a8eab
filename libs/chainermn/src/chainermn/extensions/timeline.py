"""Record a timeline of all ranks."""

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
from chainermn.profiling.timeline_file import Settings, TimelineFile


class Timeline(Extension):
    """Extension that records a timeline of all ranks (profiling), and writes it into one file.

    Open the file in https://ui.perfetto.dev, which shows a process for each rank and a track for
    each thread, or run ``chainermn report`` for a summary. The format is the Trace Event Format.
    The environment variable ``CHAINERMN_TIMELINE=FILE`` does the same for a script without this
    extension.

    The timeline shows, for each iteration, the wait for the batch and its conversion, forward,
    backward, each step of the exchange for each bucket, the wait for other ranks, the optimizer,
    extensions, evaluation and checkpoints. A rank keeps its latest 50,000 spans.

    Use it on every rank. The file is written when training ends, unless an exception ends it.

    Parameters
    ----------
    comm : CommunicatorBase
        Communicator of the ranks to record.
    filename : path
        Name of the file in the trainer's folder. It is compressed if it ends with ``.gz``.
    layers : bool
        Whether to record the forward of each link and the backward of each function. This takes
        some microseconds each.
    iterations : (int, int), optional
        First and last iteration to record; all by default.

    Raises
    ------
    OSError
        On every rank, at the start of training, if the file cannot be written.
    ValueError
        If ``iterations`` is not a pair of a first and a last iteration.

    Examples
    --------
    >>> trainer.extend(chainermn.extensions.Timeline(comm, iterations=(2, 3)))
    >>> trainer.run()
    timeline of 2 ranks: .../result/timeline.json. Open it in https://ui.perfetto.dev, ...
    """

    trigger = None  # it does nothing during training
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
        """Start to record."""
        settings = replace(self._settings, path=str(Path(trainer.out, self.filename)))
        self._has_failed = False
        self._file = TimelineFile(self.comm.mpi_comm, settings, "Timeline")
        self._file.add(trainer)

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        """Do nothing."""

    def on_error(self, trainer: chainer.training.Trainer, exc: Exception, tb: Any) -> None:
        """Remember that an exception ends training."""
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
