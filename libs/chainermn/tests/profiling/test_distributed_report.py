"""Reports per epoch, on real ranks of which one is late."""

from __future__ import annotations

import builtins
import copy
import importlib.util
import json
import threading
import time
from collections.abc import Iterator
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
from chainermn.profiling import trainers
from chainermn.profiling.timeline.summary import PARTS

PAUSE = 0.05


class LastOfAll(chainer.iterators.SerialIterator):
    """An iterator that is late on purpose.

    It returns a batch some time after all other ranks have entered the exchange for that batch.
    """

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
    """Append a letter to a file each time this rank reaches another exchange."""
    seen = 0
    while spans.are_wanted():
        for wait, _ in activity.waits():
            if wait.operation == "multi_node_mean_grad" and wait.number > seen:
                seen = wait.number
                with file.open("a") as opened:
                    opened.write("x")
        time.sleep(0.001)


def make_trainer(comm: Any, out: Path, late: int | None = None, epochs: int = 2) -> Any:
    """Return a trainer with three iterations per epoch; ``late`` is last in every exchange."""
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
    assert straggler.rank == 1
    assert summary.ranks[1].seconds["data"] > PAUSE

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
@pytest.mark.parametrize("filename", [None, ""])
def test_one_rank_is_efficient_and_nobody_waits(tmp_path: Path, filename: str | None) -> None:
    comm = chainermn.create_communicator()
    trainer = make_trainer(comm, tmp_path)
    report = DistributedReport(comm, filename=filename)
    trainer.extend(report)
    trainer.run()
    assert report.summary is not None
    assert report.summary.mean("waiting") == 0
    assert report.summary.straggler is None
    assert 0 < report.summary.efficiency <= 1
    assert not list(tmp_path.glob("*.png"))


def single_trainer(out: Path, batches: Any = None, **settings: Any) -> Any:
    """Return a trainer that runs two iterations in one process."""
    optimizer = chainer.optimizers.SGD().setup(chainer.links.Linear(3, 1))
    updater = chainer.training.StandardUpdater(
        batches or chainer.iterators.SerialIterator(np.ones((6, 3), np.float32), 2),
        optimizer,
        loss_func=lambda x: chainer.functions.sum(optimizer.target(x)),
        **settings,
    )
    return chainer.training.Trainer(updater, (2, "iteration"), out=str(out))


@pytest.fixture
def heard() -> Iterator[list[spans.Span]]:
    found: list[spans.Span] = []
    spans.listen(found.append)
    yield found
    spans.unlisten(found.append)


def test_a_trainer_is_instrumented_once(tmp_path: Path, heard: list[spans.Span]) -> None:
    trainer = single_trainer(tmp_path)
    assert trainers.instrument(trainer) is trainers.instrument(trainer)
    trainer.run()
    assert [span.name for span in heard] == ["data", "convert", "extensions", "iteration"] * 2


def test_a_converter_may_take_more(tmp_path: Path, heard: list[spans.Span]) -> None:
    def convert(batch: Any, device: Any, padding: int = 0) -> Any:
        return np.stack(batch) + padding

    trainer = single_trainer(tmp_path, converter=convert)
    trainers.instrument(trainer)
    assert trainer.updater.converter([np.zeros(2)], None, padding=3).tolist() == [[3, 3]]
    assert [span.name for span in heard] == ["convert"]


def test_a_copy_of_an_iterator_goes_its_own_way(tmp_path: Path) -> None:
    batches = chainer.iterators.SerialIterator(np.arange(6), 2, shuffle=False)
    trainers.instrument(single_trainer(tmp_path, batches))
    batches.next()
    assert copy.copy(batches).next() == [2, 3]
    assert batches.next() == [2, 3]


def test_triggers_stay_what_they_are(tmp_path: Path) -> None:
    trainer = single_trainer(tmp_path)
    trainer.extend(LogReport(trigger=(1, "iteration")))
    trainers.instrument(trainer)
    assert trainer.stop_trigger.get_training_length() == (2, "iteration")
    trainer.run()
    assert [row["iteration"] for row in trainer.get_extension("LogReport").log] == [1, 2]
    saved = chainer.serializers.npz.serialize(trainer)
    twin = single_trainer(tmp_path)
    twin.extend(LogReport(trigger=(1, "iteration")))
    trainers.instrument(twin)
    chainer.serializers.npz.NpzDeserializer(saved).load(twin)
    assert twin.updater.iteration == 2


@pytest.mark.mpi(1)
def test_time_of_extensions_before_the_report_is_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    comm = chainermn.create_communicator()
    trainer = single_trainer(tmp_path)
    report = DistributedReport(comm, filename=None)
    trainer.extend(report, trigger=(2, "iteration"))
    ahead = 0

    @make_extension(trigger=(1, "iteration"), priority=300)
    def slow(_: Any) -> None:
        nonlocal ahead
        ahead += 10**12

    trainer.extend(slow, name="slow")
    monkeypatch.setattr(spans, "now", lambda: time.monotonic_ns() + ahead)
    trainer.run()
    (rank,) = report.summary.ranks
    assert rank.extensions["slow"] == pytest.approx(1000, rel=0.1)
    assert rank.seconds["extensions"] == pytest.approx(1000, rel=0.1)
    assert rank.seconds["other"] < 100


@pytest.mark.mpi(1)
def test_a_picture_must_be_one(tmp_path: Path) -> None:
    comm = chainermn.create_communicator()
    with pytest.raises(ValueError, match=r"must end with \.png.*, got ranks\.jpgx"):
        DistributedReport(comm, "ranks.jpgx")
    trainer = single_trainer(tmp_path)
    trainer.extend(DistributedReport(comm, "sub/ranks.svg"), trigger=(2, "iteration"))
    trainer.run()
    assert "<svg" in (tmp_path / "sub/ranks.svg").read_text()


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
