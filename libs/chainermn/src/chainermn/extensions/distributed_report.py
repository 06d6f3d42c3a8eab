"""Report where the time of all ranks goes."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import chainer
from chainer.training.extension import PRIORITY_EDITOR, Extension

from chainermn.agreement import run_on_root
from chainermn.arguments import check_communicator
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.observation.trainers import Observation, observe
from chainermn.timeline.chart import check_picture, draw
from chainermn.timeline.gathering import SharedGathering
from chainermn.timeline.summary import Summary

_REPORTED = ("data", "compute", "layers", "exchange", "waiting")


class DistributedReport(Extension):
    """Reports, once per epoch, where the time of all ranks goes.

    On rank 0 it reports, for Chainer's ``LogReport`` and all that reads the log:

    - ``parallel efficiency``: the share of the time, from 0 to 1, that the ranks spend neither on
      exchanging nor on waiting for each other;
    - ``time/data``, ``time/compute``, ``time/layers`` (what multi-node layers exchange),
      ``time/exchange`` and ``time/waiting``: seconds of a mean iteration, on average over the
      ranks, and ``time/data/slowest`` and so on of the rank that takes longest for it;
    - ``slowest rank``: the rank that the others wait for, if they do.

    Give ``LogReport`` the same trigger: it would take the mean of several reports.

    When training ends, it draws the last epoch into a picture, a bar for each rank. The `Summary`
    of the last epoch is its attribute ``summary``, whose ``straggler`` says what the slowest rank
    is slow at, and whose ``advice()`` says what to do about all this.

    Use it on every rank, wherever the log is kept: ``trainer.extend(DistributedReport(comm))``.

    Parameters
    ----------
    comm : CommunicatorBase
        Its ranks are reported on.
    filename : path, optional
        Picture in the trainer's folder; None for none.

    Attributes
    ----------
    summary : Summary or None
        On rank 0, once there is one.

    Raises
    ------
    ValueError
        If ``filename`` does not end as the name of a picture.
    ModuleNotFoundError
        On every rank, if there is to be a picture and rank 0 has no matplotlib.
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
        self._observation: Observation
        self._picture: tuple[Path, str] | None = None
        if filename is not None:
            check_picture(filename)
            run_on_root(comm, 0, "DistributedReport", _check_matplotlib)

    def initialize(self, trainer: chainer.training.Trainer) -> None:
        """Begin to measure. Every rank must have this extension."""
        self.comm.allgather_obj(None)
        self._observation = observe(trainer)
        self._gathering = SharedGathering(self.comm.mpi_comm)

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        """Report on the time since the last report. Every rank must call it."""
        if self._gathering is None:
            return
        self._observation.tell()
        self.summary = self._gathering.take()
        if self.summary is None:
            return
        chainer.report(_observations_of(self.summary))
        if self.filename is not None:
            self._picture = Path(trainer.out, self.filename), f"epoch {trainer.updater.epoch}"

    def finalize(self) -> None:
        """Measure no more, and draw: drawing takes longer than many an iteration."""
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
