"""The same seed gives the same run; saving, stopping and resuming change nothing."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import random
from pathlib import Path
from typing import Any, NamedTuple

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer.training import Trainer, extensions, triggers
from chainer.training.extensions import snapshot_writers
from chainer.training.updaters import StandardUpdater

import chainermn
from chainermn.extensions import BestModel, multi_node_snapshot

EXAMPLES, BATCH = 12, 3  # of each rank, so that an epoch has 4 iterations
END = 10


class Case(NamedTuple):
    """A way to train, as a user may choose it."""

    iterator: str
    dropout: bool
    seeds: str
    stop: int
    writer: str
    ranks: int


VALUES: dict[str, list[Any]] = {
    "iterator": [
        "SerialIterator",
        "MultithreadIterator",
        "MultiprocessIterator, forkserver",
        "MultiprocessIterator, spawn",
        "chainermn's MultiprocessIterator, forkserver",
        "chainermn's MultiprocessIterator, spawn",
    ],
    "dropout": [False, True],
    "seeds": ["equal", "per rank"],
    "stop": [3, 4, 5],  # before, at and after the end of an epoch
    "writer": ["SimpleWriter", "ThreadWriter", "ThreadQueueWriter"],
    "ranks": [1, 2, 3],
}


def pairs_of(case: Case) -> set[Any]:
    return set(itertools.combinations(enumerate(case), 2))


def pairwise() -> list[Case]:
    """Return few cases that have all pairs of values, those that take least time first."""
    cases = [Case(*values) for values in itertools.product(*VALUES.values())]
    random.Random(0).shuffle(cases)
    missing = set().union(*map(pairs_of, cases))
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(pairs_of(case) & missing))
        missing -= pairs_of(best)
        chosen.append(best)
    return sorted(chosen, key=lambda case: (method_of(case), case.ranks))


def method_of(case: Case) -> str:
    """Return how the iterator of a case starts processes; empty if it starts none."""
    return case.iterator.partition(", ")[2]


CASES = pairwise()
N_DAILY = 10


class Net(chainer.Chain):
    def __init__(self, dropout: bool) -> None:
        super().__init__()
        self._ratio = 0.5 if dropout else 0.0
        with self.init_scope():
            self.first = L.Linear(2, 16)
            self.norm = L.BatchNormalization(16)
            self.last = L.Linear(16, 2)

    def forward(self, x: Any) -> Any:
        return self.last(F.dropout(F.relu(self.norm(self.first(x))), self._ratio))


def make_iterator(kind: str, data: Any) -> Any:
    name = kind.split(",")[0]
    if name == "SerialIterator":
        return chainer.iterators.SerialIterator(data, BATCH)
    if name == "MultithreadIterator":
        return chainer.iterators.MultithreadIterator(data, BATCH, n_threads=2)
    from_library = name.startswith("chainermn's")
    package = chainermn.iterators if from_library else chainer.iterators
    return package.MultiprocessIterator(data, BATCH, n_processes=1, n_prefetch=2, shared_mem=64)


def train(case: Case, comm: Any, out: Path, stops: list[int], seed: int, resume: bool) -> Trainer:
    np.random.seed(seed + (comm.rank if case.seeds == "per rank" else 0))
    model = L.Classifier(Net(case.dropout))
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.Adam(0.01), comm)
    optimizer.setup(model)
    x = np.random.RandomState(1).normal(size=(EXAMPLES * comm.size, 2)).astype(np.float32)
    data = chainer.datasets.TupleDataset(x, (x.sum(axis=1) > 0).astype(np.int32))
    part = chainermn.scatter_dataset(data, comm, shuffle=True, seed=0)
    iterator = make_iterator(case.iterator, part)
    trainer = Trainer(StandardUpdater(iterator, optimizer), (END, "iteration"), out=str(out))
    test = chainer.iterators.SerialIterator(part, BATCH, repeat=False, shuffle=False)
    evaluator = chainermn.create_multi_node_evaluator(extensions.Evaluator(test, model), comm)
    trainer.extend(evaluator, trigger=(2, "iteration"))
    if comm.rank == 0:
        trainer.extend(extensions.LogReport(trigger=(2, "iteration")))
        best = BestModel(model, "validation/main/loss", mode="min")
        trainer.extend(best, trigger=(2, "iteration"))
    snapshot = multi_node_snapshot(
        comm,
        extensions.snapshot(writer=getattr(snapshot_writers, case.writer)()),
        [],
        settings=case._asdict(),
    )
    when = triggers.ManualScheduleTrigger([*stops, END], "iteration")
    trainer.extend(snapshot, trigger=when)
    assert snapshot.resume(trainer) == resume
    trainer.run()
    iterator.finalize()
    comm.allgather_obj(None)
    return trainer


def contents_of(out: Path) -> dict[str, bytes]:
    """Return everything in the final snapshot and in the best model, without times."""
    found = {}
    for file in [f"snapshot_iter_{END}.0", "best.npz"]:
        with np.load(out / file, allow_pickle=False) as saved:
            for key in saved:
                value = saved[key]
                if key.endswith("LogReport/_log"):
                    log = json.loads(str(value))
                    value = np.array([sorted(set(entry.items()) - times(entry)) for entry in log])
                if not key.endswith("_snapshot_elapsed_time"):
                    found[f"{file}: {key}"] = value.tobytes()
    return found


def times(entry: dict[str, Any]) -> set[Any]:
    return {("elapsed_time", entry["elapsed_time"])}


@pytest.fixture
def processes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if method := method_of(request.getfixturevalue("case")):
        multiprocessing.set_forkserver_preload(["chainer"])
        monkeypatch.setattr(multiprocessing, "Pool", multiprocessing.get_context(method).Pool)


def of_ranks(ranks: int) -> pytest.MarkDecorator:
    """Give a test the cases on so many ranks."""
    return pytest.mark.parametrize(
        "case",
        [
            pytest.param(
                case,
                id="-".join(map(str, case[:-1])).replace(" ", "_"),
                marks=[pytest.mark.nightly] * (index >= N_DAILY),
            )
            for index, case in enumerate(CASES)
            if case.ranks == ranks
        ],
    )


@pytest.mark.mpi(1)
@pytest.mark.usefixtures("processes")
@of_ranks(1)
def test_one_rank(
    case: Case, comm: Any, shared_tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    check(case, comm, shared_tmp_path, capfd)


@pytest.mark.mpi(2)
@pytest.mark.usefixtures("processes")
@of_ranks(2)
def test_two_ranks(
    case: Case, comm: Any, shared_tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    check(case, comm, shared_tmp_path, capfd)


@pytest.mark.mpi(3)
@pytest.mark.usefixtures("processes")
@of_ranks(3)
def test_three_ranks(
    case: Case, comm: Any, shared_tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    check(case, comm, shared_tmp_path, capfd)


def check(case: Case, comm: Any, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Train without, with, and from a snapshot."""
    whole, saved = folder / "whole", folder / "saved"
    train(case, comm, whole, [], seed=7, resume=False)
    train(case, comm, saved, [case.stop], seed=7, resume=False)
    expected = contents_of(whole)
    assert contents_of(saved) == expected
    comm.allgather_obj(None)
    if comm.rank == 0:
        for name in [f"snapshot_iter_{END}.0", "log"]:
            (saved / name).unlink()
    comm.allgather_obj(None)
    # The seed would differ if it were used.
    train(case, comm, saved, [case.stop], seed=8, resume=True)
    assert contents_of(saved) == expected
    assert "will not repeat" not in capfd.readouterr().err


def test_cases_have_all_pairs_of_values() -> None:
    every = itertools.product(*VALUES.values())
    assert set().union(*map(pairs_of, CASES)) == set().union(*(pairs_of(Case(*v)) for v in every))
    assert len(CASES) <= 60
    daily = CASES[:N_DAILY]
    assert {method_of(case) for case in daily} == {"", "forkserver"}
    for name in Case._fields[1:]:
        assert {getattr(case, name) for case in daily} == set(VALUES[name])
