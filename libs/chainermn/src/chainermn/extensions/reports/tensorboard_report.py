"""Show the log in TensorBoard."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import chainer
from chainer.training.extension import Extension


class TensorBoardReport(Extension):
    """Extension that writes the log for TensorBoard, as scalars by iteration.

    View it with ``tensorboard --logdir result/tensorboard``. A resumed run continues the same
    curves. Use it on one rank, together with Chainer's ``LogReport``.

    Parameters
    ----------
    folder : str
        Name of a folder in the trainer's folder.
    log_report : str
        Name of the ``LogReport`` extension of the trainer.

    Raises
    ------
    ModuleNotFoundError
        If tensorboardX is not installed.

    Examples
    --------
    >>> if comm.rank == 0:
    ...     trainer.extend(training.extensions.LogReport())
    ...     trainer.extend(chainermn.extensions.TensorBoardReport())
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
        """Open the folder; the rows that the log has now have been written before."""
        self._n_written = len(trainer.get_extension(self.log_report).log)
        folder = Path(trainer.out, self.folder)
        # Values from after the snapshot that this run resumes from are no longer valid.
        self._writer = self._tensorboard.SummaryWriter(
            str(folder), purge_step=trainer.updater.iteration + 1
        )

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        """Write the new rows of the log."""
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
