"""What is reported per epoch, on real ranks, one of which is late."""

from __future__ import annotations

import builtins
import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import chainer
import numpy as np
import pytest
from chainer.training.extensions import LogReport

import chainermn
from chainermn import spans
from chainermn.extensions import DistributedReport
from chainermn.timeline import trainers
from chainermn.timeline.summary import PARTS

PAUSE = 0.05


class TogetherLate(chainer.iterators.SerialIterator):
    """On a late rank, gives a batch when all others are about to exchange their gradients."""

    def __init__(self, data: Any, folder: Path, rank: int, late: int, size: int) -> None:
        super().__init__(data, 2)
        self._signals = [folder / f"{rank}" for rank in range(size) if rank != late]
        self._own = folder / f"{rank}"
        self._is_late, self._n = rank == late, 0

    def next(self) -> Any:
        self._n += 1
        if self._is_late:
            while any(not s.exists() or int(s.read_text() or 0) < self._n for s in self._signals):
                time.sleep(0.001)
        return super().next()

    def say(self) -> None:
        """Tell the late rank that this one has computed its gradients."""
        time.sleep(PAUSE)
        self._own.write_text(str(self._n))


def make_trainer(comm: Any, out: Path, late: int, epochs: int = 2) -> Any:
    """Return a trainer of three iterations an epoch."""
    model = chainer.links.Linear(3, 1)
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), comm)
    optimizer.setup(model)
    data = np.ones((6, 3), np.float32)
    batches = TogetherLate(data, out, comm.rank, late, comm.size)

    def loss(x: Any) -> chainer.Variable:
        if comm.rank != late:
            batches.say()
        return chainer.functions.sum(model(x))

    updater = chainer.training.StandardUpdater(batches, optimizer, loss_func=loss)
    return chainer.training.Trainer(updater, (epochs, "epoch"), out=str(out))


@pytest.mark.mpi(3)
def test_the_rank_that_waits_for_data_is_named(shared_tmp_path: Path) -> None:
    comm = chainermn.create_communicator()
    trainer = make_trainer(comm, shared_tmp_path, late=1)
    report = DistributedReport(comm)
    trainer.extend(report)
    if comm.rank == 0:
        trainer.extend(LogReport())
    trainer.run()
    assert not spans.are_wanted()
    if comm.rank != 0:
        assert report.summary is None
        return
    summary = report.summary
    assert summary is not None
    straggler = summary.straggler
    assert straggler is not None
    assert (straggler.rank, straggler.part) == (1, "data")
    assert straggler.seconds > PAUSE
    assert summary.ranks[1].share_with_slow_data == 1
    assert any("100% of rank 1's iterations wait for data" in one for one in summary.advice())

    log = json.loads((shared_tmp_path / "log").read_text())
    assert [row["epoch"] for row in log] == [1, 2]
    last = log[-1]
    assert last["slowest rank"] == 1
    assert last["parallel efficiency"] == pytest.approx(summary.efficiency)
    for part in ("data", "compute", "exchange", "waiting"):
        assert last[f"time/{part}"] == pytest.approx(summary.mean(part))
        assert last[f"time/{part}/slowest"] == pytest.approx(summary.slowest(part)[1])
    assert summary.iteration == pytest.approx(sum(summary.mean(part) for part in PARTS))
    assert (shared_tmp_path / "ranks.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.mpi(1)
def test_one_rank_is_efficient_and_nobody_waits(tmp_path: Path) -> None:
    comm = chainermn.create_communicator()
    trainer = make_trainer(comm, tmp_path, late=-1)
    report = DistributedReport(comm, filename=None)
    trainer.extend(report)
    trainer.run()
    assert report.summary is not None
    assert report.summary.mean("waiting") == 0
    assert report.summary.straggler is None
    assert 0 < report.summary.efficiency <= 1
    assert not list(tmp_path.glob("*.png"))


def test_a_trainer_is_observed_once(tmp_path: Path) -> None:
    data = np.ones((6, 3), np.float32)
    optimizer = chainer.optimizers.SGD().setup(chainer.links.Linear(3, 1))
    updater = chainer.training.StandardUpdater(
        chainer.iterators.SerialIterator(data, 2),
        optimizer,
        loss_func=lambda x: chainer.functions.sum(optimizer.target(x)),
    )
    trainer = chainer.training.Trainer(updater, (2, "iteration"), out=str(tmp_path))
    assert trainers.observe(trainer) is trainers.observe(trainer)
    found: list[spans.Span] = []
    spans.listen(found.append)
    try:
        trainer.run()
    finally:
        spans.unlisten(found.append)
    names = ["data", "convert", "extensions", "iteration", "data", "convert"]
    assert [span.name for span in found] == names


@pytest.mark.mpi(2)
def test_without_matplotlib_all_ranks_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    comm = chainermn.create_communicator()
    if comm.rank == 0:
        find_spec = importlib.util.find_spec

        def without(name: str, *arguments: Any) -> Any:
            return None if name == "matplotlib" else find_spec(name, *arguments)

        monkeypatch.setattr(importlib.util, "find_spec", without)
    kind = builtins.ModuleNotFoundError if comm.rank == 0 else RuntimeError
    with pytest.raises(kind, match=r"pip install matplotlib, or give filename=None"):
        DistributedReport(comm)
    DistributedReport(comm, filename=None)
