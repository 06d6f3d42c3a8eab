"""Report how all ranks spend their time."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import chainer
from chainer.training.extension import PRIORITY_EDITOR, Extension

from chainermn.agreement import run_on_root
from chainermn.arguments import check_communicator
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.profiling.timeline.chart import check_picture, draw
from chainermn.profiling.timeline.gathering import SharedGathering
from chainermn.profiling.timeline.summary import Summary
from chainermn.profiling.trainers import TrainerSpans, instrument

_REPORTED = ("data", "compute", "layers", "exchange", "waiting")


class DistributedReport(Extension):
    """Extension that reports, once per epoch, how all ranks spend their time.

    On rank 0, it reports these values, which appear in Chainer's ``LogReport``:

    - ``parallel efficiency``: fraction of the time, from 0 to 1, in which the ranks neither
      exchange nor wait for each other;
    - ``time/data``, ``time/compute``, ``time/layers`` (exchange in multi-node layers),
      ``time/exchange`` and ``time/waiting``: seconds per iteration, on average over the ranks.
      ``time/data/slowest`` and so on are those of the rank that takes longest;
    - ``slowest rank``: number of the rank that the others wait for, if there is one.

    Give ``LogReport`` the same trigger, because it would average several reports.

    When training ends, the last epoch is drawn into a picture with a bar for each rank. The
    attribute ``summary`` is the `Summary` of the last epoch: its ``straggler`` tells why the
    slowest rank is slow, and its ``advice()`` tells what to do.

    Use it on every rank.

    Parameters
    ----------
    comm : CommunicatorBase
        Communicator of the ranks to report on.
    filename : path, optional
        Name of the picture in the trainer's folder; None to draw none.

    Attributes
    ----------
    summary : Summary or None
        Summary of the last epoch, on rank 0.

    Raises
    ------
    ValueError
        If ``filename`` does not have the suffix of a picture.
    ModuleNotFoundError
        On every rank, if a picture is wanted and rank 0 has no matplotlib.

    Examples
    --------
    >>> report = chainermn.extensions.DistributedReport(comm, filename=None)
    >>> trainer.extend(report)
    >>> trainer.run()
    >>> if comm.rank == 0:
    ...     print(0 < report.summary.efficiency < 1)
    True
    """

    trigger = 1, "epoch"
    priority = PRIORITY_EDITOR  # after evaluators, before LogReport

    def __init__(
        self, comm: CommunicatorBase, filename: str | os.PathLike[str] | None = "ranks.png"
    ) -> None:
        check_communicator("DistributedReport(comm)", comm, filename)
        self.comm, self.filename = comm, filename
        self.summary: Summary | None = None
        self._gathering: SharedGathering | None = None
        self._spans: TrainerSpans
        self._picture: tuple[Path, str] | None = None
        if filename:
            check_picture(filename)
            run_on_root(comm, 0, "DistributedReport", _check_matplotlib)

    def initialize(self, trainer: chainer.training.Trainer) -> None:
        """Start to measure. Every rank must have this extension."""
        self.comm.allgather_obj(None)
        self._spans = instrument(trainer)
        self._gathering = SharedGathering(self.comm.mpi_comm)

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        """Report on the time since the last report. Every rank must call it."""
        if self._gathering is None:
            return
        self._spans.flush()
        self.summary = self._gathering.take()
        if self.summary is None:
            return
        chainer.report(_observations_of(self.summary))
        if self.filename:
            self._picture = Path(trainer.out, self.filename), f"epoch {trainer.updater.epoch}"

    def finalize(self) -> None:
        """Stop measuring, and draw; drawing takes longer than many iterations."""
        if self._gathering is not None:
            self._gathering.stop()
            self._gathering = None
        if self._picture is not None and self.summary is not None:
            draw(self.summary, *self._picture)


def _observations_of(summary: Summary) -> dict[str, float]:
    found: dict[str, float] = {"parallel efficiency": summary.efficiency}
    for part in _REPORTED:
        found[f"time/{part}"] = summary.mean(part)
        _, found[f"time/{part}/slowest"] = summary.slowest(part)
    if summary.straggler is not None:
        found["slowest rank"] = summary.straggler.rank
    return found


def _check_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            "DistributedReport draws with matplotlib: pip install matplotlib, or give "
            "filename=None"
        )
