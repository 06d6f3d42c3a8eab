"""Show the log in TensorBoard."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import chainer
from chainer.training.extension import Extension


class TensorBoardReport(Extension):
    """Writes the entries of the log for TensorBoard, as scalars by iteration.

    ``tensorboard --logdir result/tensorboard`` shows them. A resumed run goes on in the same
    curves.

    Use it on one rank, after Chainer's ``LogReport``:
    ``if comm.rank == 0: trainer.extend(TensorBoardReport())``.

    Parameters
    ----------
    folder : str
        In the trainer's folder.
    log_report : str
        Name of the ``LogReport`` in the trainer.

    Raises
    ------
    ModuleNotFoundError
        If tensorboardX is not installed.
    """

    trigger = 1, "iteration"
    priority = 90  # after LogReport

    def __init__(self, folder: str = "tensorboard", log_report: str = "LogReport") -> None:
        try:
            self._tensorboard: Any = importlib.import_module("tensorboardX")
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                "TensorBoardReport needs tensorboardX: pip install tensorboardX"
            ) from None
        self.folder, self.log_report = folder, log_report
        self._writer: Any = None
        self._n_written = 0

    def initialize(self, trainer: chainer.training.Trainer) -> None:
        """Open the folder; rows of the log that there are already have been written there."""
        self._n_written = len(trainer.get_extension(self.log_report).log)
        folder = Path(trainer.out, self.folder)
        # What was written after the snapshot that training goes on from does not count any more.
        self._writer = self._tensorboard.SummaryWriter(
            str(folder), purge_step=trainer.updater.iteration + 1
        )

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        """Write the rows of the log that are new."""
        log = trainer.get_extension(self.log_report).log
        for row in log[self._n_written :]:
            for name, value in row.items():
                if name not in ("epoch", "iteration"):
                    self._writer.add_scalar(name, value, row["iteration"])
            self._writer.flush()
        self._n_written = len(log)

    def finalize(self) -> None:
        """Close the files."""
        if self._writer is not None:
            self._writer.close()
