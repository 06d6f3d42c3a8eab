"""What is reported per epoch, on real ranks, one of which is late."""

from __future__ import annotations

import builtins
import importlib.util
import json
import threading
import time
from pathlib import Path
from typing import Any

import chainer
import numpy as np
import pytest
from chainer.training import make_extension
from chainer.training.extensions import LogReport

import chainermn
from chainermn import spans
from chainermn.extensions import DistributedReport
from chainermn.failures import activity
from chainermn.observation import trainers
from chainermn.timeline.summary import PARTS

PAUSE = 0.05


class LastOfAll(chainer.iterators.SerialIterator):
    """Gives a batch when all other ranks are in the exchange that it is for, and a while later."""

    def __init__(self, data: Any, others: list[Path]) -> None:
        super().__init__(data, 2)
        self._others, self._n = others, 0

    def next(self) -> Any:
        self._n += 1
        while any(not file.exists() or len(file.read_text()) < self._n for file in self._others):
            time.sleep(0.001)
        time.sleep(PAUSE)
        return super().next()


def note_exchanges(file: Path) -> None:
    """Write a letter into a file whenever this rank has come to another exchange."""
    seen = 0
    while spans.are_wanted():
        for wait, _ in activity.waits():
            if wait.operation == "multi_node_mean_grad" and wait.number > seen:
                seen = wait.number
                with file.open("a") as opened:
                    opened.write("x")
        time.sleep(0.001)


def make_trainer(comm: Any, out: Path, late: int | None = None, epochs: int = 2) -> Any:
    """Return a trainer of three iterations an epoch; a late rank is the last in all exchanges."""
    model = chainer.links.Linear(3, 1)
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), comm)
    optimizer.setup(model)
    data = np.ones((6, 3), np.float32)
    batches = chainer.iterators.SerialIterator(data, 2)
    if comm.rank == late:
        others = [out / f"exchanges{rank}" for rank in range(comm.size) if rank != late]
        batches = LastOfAll(data, others)
    updater = chainer.training.StandardUpdater(
        batches, optimizer, loss_func=lambda x: chainer.functions.sum(model(x))
    )
    trainer = chainer.training.Trainer(updater, (epochs, "epoch"), out=str(out))

    notes = make_extension(
        trigger=None,
        priority=0,
        initializer=lambda _: threading.Thread(
            target=note_exchanges, args=(out / f"exchanges{comm.rank}",)
        ).start(),
    )
    if late is not None:
        trainer.extend(notes(lambda _: None), name="notes")
    return trainer


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
    trainer = make_trainer(comm, tmp_path)
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
