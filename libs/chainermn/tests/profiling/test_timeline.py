"""Timelines of real jobs: what they contain, and what happens when something goes wrong."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import chainer
import numpy as np
import pytest

import chainermn
from chainermn import spans
from chainermn.extensions import Timeline, create_multi_node_checkpointer
from chainermn.profiling.timeline import recording, trace
from chainermn.profiling.timeline.clocks import Clock, Offset
from chainermn.profiling.timeline_file import ITERATIONS, LAYERS, VARIABLE, Settings
from chainermn.spans import MAIN, Span

STEP = ["data", "convert", "forward", "backward", "multi_node_mean_grad", "optimizer"]


@pytest.fixture(autouse=True)
def nobody_listens_afterwards() -> Iterator[None]:
    yield
    assert not spans.are_wanted()


def make_trainer(comm: Any, out: Path, n: int = 4, **settings: Any) -> Any:
    """Return a trainer for ``n`` iterations, two per epoch, that evaluates after each epoch."""
    model = chainer.links.Classifier(
        chainer.Sequential(chainer.links.Linear(3, 4), chainer.links.Linear(4, 2))
    )
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), comm, **settings)
    optimizer.setup(model)
    x, t = np.ones((8, 3), np.float32), np.zeros(8, np.int32)
    data = chainer.datasets.TupleDataset(x, t)
    batches = chainer.iterators.SerialIterator(data, 4)
    updater = chainer.training.StandardUpdater(batches, optimizer)
    trainer = chainer.training.Trainer(updater, (n, "iteration"), out=str(out))
    rest = chainer.iterators.SerialIterator(data, 4, repeat=False, shuffle=False)
    evaluator = chainer.training.extensions.Evaluator(rest, model)
    trainer.extend(chainermn.create_multi_node_evaluator(evaluator, comm))
    checkpointer = create_multi_node_checkpointer("small", comm)
    trainer.extend(checkpointer, trigger=(1, "epoch"))
    return trainer


def recorded(comm: Any, file: Path) -> dict[int, list[Span]]:
    """Return the spans in the file, on every rank."""
    return comm.bcast_obj(trace.read(file).spans if comm.rank == 0 else None)


def named(track: list[Span], *names: str) -> list[str]:
    return [span.name for span in track if span.name in names]


@pytest.mark.mpi(1, 2, 3)
def test_every_rank_is_shown(shared_tmp_path: Path) -> None:
    comm = chainermn.create_communicator()
    trainer = make_trainer(comm, shared_tmp_path)
    trainer.extend(Timeline(comm))
    trainer.run()
    tracks = recorded(comm, shared_tmp_path / "timeline.json")
    assert sorted(tracks) == list(range(comm.size))
    for track in tracks.values():
        main = sorted((span for span in track if span.track == MAIN), key=lambda span: span.start)
        iterations = [span for span in main if span.name == "iteration"]
        assert [span.details["iteration"] for span in iterations] == [1, 2, 3, 4]
        for iteration in iterations[1:]:  # the first one makes the replicas equal
            inside = [s for s in main if iteration.start <= s.start < iteration.end]
            assert named(inside, *STEP) == STEP
        of_extensions = ["evaluation", "extension validation"]
        of_extensions += ["checkpoint", "extension small"]
        in_order = sorted(main, key=lambda span: span.end)
        assert named(in_order, *of_extensions) == of_extensions * 2
        n_buckets = 3 if comm.size > 1 else 0  # one per iteration, except the first
        for name in ("gather gradients", "all-reduce", "hand back"):
            assert len(named(main, name)) == n_buckets
            assert all(s.details["bytes"] == 104 for s in main if s.name == name)


@pytest.mark.mpi(3)
def test_the_same_calls_meet_on_all_ranks(shared_tmp_path: Path) -> None:
    comm = chainermn.create_communicator()
    trainer = make_trainer(comm, shared_tmp_path)
    trainer.extend(Timeline(comm))
    trainer.run()
    of_ranks = [
        {
            (span.details["stream"], span.details["number"]): span
            for span in track
            if span.name == "multi_node_mean_grad"
        }
        for track in recorded(comm, shared_tmp_path / "timeline.json").values()
    ]
    assert len(of_ranks[0]) == 4
    for key, span in of_ranks[0].items():
        # Nobody leaves before all have arrived; the file rounds to microseconds.
        assert span.end + 1000 >= max(of_rank[key].start for of_rank in of_ranks)


@pytest.mark.mpi(2)
def test_exchanges_beside_backward_have_tracks_of_their_own(shared_tmp_path: Path) -> None:
    comm = chainermn.create_communicator()
    trainer = make_trainer(comm, shared_tmp_path, overlap=True)
    trainer.extend(Timeline(comm))
    trainer.run()
    for track in recorded(comm, shared_tmp_path / "timeline.json").values():
        beside = [span for span in track if span.track.startswith("exchange ")]
        assert {"gather gradients", "all-reduce"} == {span.name for span in beside}
        assert not named([span for span in track if span.track == MAIN], "all-reduce")


@pytest.mark.mpi(2)
def test_an_exchange_in_the_background_is_shown_where_it_happens(shared_tmp_path: Path) -> None:
    comm = chainermn.create_communicator()
    trainer = make_trainer(comm, shared_tmp_path, double_buffering=True)
    trainer.extend(Timeline(comm))
    trainer.run()
    trainer.updater.get_optimizer("main").wait()
    for track in recorded(comm, shared_tmp_path / "timeline.json").values():
        (thread,) = {span.track for span in track if span.name == "multi_node_mean_grad"}
        assert thread != MAIN
        assert "wait for the exchange" in {span.name for span in track if span.track == MAIN}


@pytest.mark.mpi(1)
def test_layers_on_demand(tmp_path: Path) -> None:
    comm = chainermn.create_communicator()
    trainer = make_trainer(comm, tmp_path, n=1)
    trainer.extend(Timeline(comm, layers=True))
    trainer.run()
    track = sorted(recorded(comm, tmp_path / "timeline.json")[0], key=lambda span: span.start)
    (forward,) = (span for span in track if span.name == "forward")
    (backward,) = (span for span in track if span.name == "backward")

    def inside(outer: Span) -> list[str]:
        return [s.name for s in track if outer.start <= s.start < s.end <= outer.end][1:]

    assert [name for name in inside(forward) if "Linear" in name] == ["0 (Linear)", "1 (Linear)"]
    found = [name for name in inside(backward) if "Linear" in name]
    assert found == ["1 (Linear): LinearFunction", "0 (Linear): LinearFunction"]


@pytest.mark.mpi(2)
def test_a_window_of_iterations(shared_tmp_path: Path) -> None:
    comm = chainermn.create_communicator()
    trainer = make_trainer(comm, shared_tmp_path, n=6)
    trainer.extend(Timeline(comm, "sub/window.json.gz", iterations=(3, 4)))
    trainer.run()
    for track in recorded(comm, shared_tmp_path / "sub/window.json.gz").values():
        numbers = [s.details["iteration"] for s in track if s.name == "iteration"]
        assert numbers == [3, 4]
        assert named(track, "forward") == ["forward"] * 2


@pytest.mark.mpi(1)
def test_a_window_of_each_of_two_trainers(tmp_path: Path) -> None:
    comm = chainermn.create_communicator()
    with chainermn.record_timeline(comm, tmp_path / "both.json", iterations=(2, 3)):
        for name in ("first", "second"):
            make_trainer(comm, tmp_path / name).run()
    (track,) = recorded(comm, tmp_path / "both.json").values()
    assert [s.details["iteration"] for s in track if s.name == "iteration"] == [2, 3, 2, 3]
    assert named(track, "forward") == ["forward"] * 4


def test_a_window_that_is_none() -> None:
    with pytest.raises(
        ValueError, match=r"the first and the last iteration to record.*got \(7, 3\)"
    ):
        Settings("file", window=(7, 3))


@pytest.mark.mpi(1)
def test_a_second_try_in_the_handler_of_the_first(tmp_path: Path) -> None:
    comm = chainermn.create_communicator()
    trainer = make_trainer(comm, tmp_path)
    trainer.extend(Timeline(comm))
    try:
        raise OSError("the first try")
    except OSError:
        trainer.run()
    assert recorded(comm, tmp_path / "timeline.json")[0]


@pytest.mark.mpi(1)
def test_a_folder_is_no_file(tmp_path: Path) -> None:
    comm = chainermn.create_communicator()
    (tmp_path / "folder").mkdir()
    record = chainermn.record_timeline(comm, tmp_path / "folder")
    with pytest.raises(IsADirectoryError), record:
        raise AssertionError("it has begun")


@pytest.mark.mpi(2)
def test_all_ranks_are_shown_from_when_all_are_known(
    shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    comm = chainermn.create_communicator()
    # Rank 1 records more spans per iteration.
    monkeypatch.setattr(recording, "MOST_SPANS", 120)
    with chainermn.record_timeline(comm, shared_tmp_path / "t.json"):
        for number in range(1, 51):
            with spans.span("iteration", details={"iteration": number}):
                comm.allgather_obj(None)  # keeps the ranks in step
                for _ in range(1 + 9 * comm.rank):
                    with spans.span("forward"):
                        pass
    numbers = [
        [s.details["iteration"] for s in track if s.name == "iteration"]
        for track in recorded(comm, shared_tmp_path / "t.json").values()
    ]
    assert numbers[1] == list(range(numbers[1][0], 51))
    assert len(numbers[1]) <= 11
    assert len(numbers[0]) < 50


@pytest.mark.mpi(1)
def test_the_latest_spans_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MOST_SPANS", 40)
    comm = chainermn.create_communicator()
    trainer = make_trainer(comm, tmp_path, n=50)
    trainer.extend(Timeline(comm))
    trainer.run()
    (track,) = recorded(comm, tmp_path / "timeline.json").values()
    numbers = [s.details["iteration"] for s in track if s.name == "iteration"]
    assert numbers == list(range(numbers[0], 51))
    assert 0 < len(numbers) < 6
    for iteration in (span for span in track if span.name == "iteration"):
        inside = [s for s in track if iteration.start <= s.start < iteration.end]
        assert set(STEP) <= {span.name for span in inside}


@pytest.mark.mpi(2)
def test_where_the_file_cannot_be_written_all_ranks_raise(shared_tmp_path: Path) -> None:
    comm = chainermn.create_communicator()
    (shared_tmp_path / "file").touch()
    comm.allgather_obj(None)
    trainer = make_trainer(comm, shared_tmp_path)
    trainer.extend(Timeline(comm, "file/timeline.json"))
    with pytest.raises(FileExistsError if comm.rank == 0 else RuntimeError, match="File exists"):
        trainer.run()


@pytest.mark.mpi(2)
def test_after_an_exception_nothing_is_written(
    shared_tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    comm = chainermn.create_communicator()
    trainer = make_trainer(comm, shared_tmp_path)
    trainer.extend(Timeline(comm))

    @chainer.training.make_extension(trigger=(2, "iteration"))
    def fail(_: Any) -> None:
        raise RuntimeError("enough")

    trainer.extend(fail)
    with pytest.raises(RuntimeError, match="enough"):
        trainer.run()
    capsys.readouterr()
    assert not list(shared_tmp_path.glob("timeline.json"))


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def test_settings_in_the_environment() -> None:
    assert Settings.from_environment() is None
    with environment(**{VARIABLE: "file"}):
        assert Settings.from_environment() == Settings("file")
    with environment(**{VARIABLE: "file", LAYERS: "1", ITERATIONS: "100-120"}):
        assert Settings.from_environment() == Settings("file", True, (100, 120))


@pytest.mark.parametrize("wrong", ["5", "a-b", "7-3", "1-2-3"])
def test_a_wrong_window_in_the_environment(wrong: str) -> None:
    refused = pytest.raises(ValueError, match=f"as in 100-120, got '{wrong}'")
    with environment(**{VARIABLE: "file", ITERATIONS: wrong}), refused:
        Settings.from_environment()


@pytest.mark.mpi(2)
@pytest.mark.parametrize(("variable", "values"), [(VARIABLE, "ab"), (ITERATIONS, ["1-2", "2-1"])])
def test_ranks_that_are_asked_for_different_timelines(
    variable: str, values: Sequence[str]
) -> None:
    from mpi4py import MPI

    asked = {VARIABLE: "file", variable: values[MPI.COMM_WORLD.rank]}
    refused = pytest.raises(ValueError, match=f"create_communicator.*{variable}=")
    with environment(**asked), refused:
        chainermn.create_communicator()


@pytest.mark.mpi(1)
def test_a_wrong_window_of_a_job() -> None:
    refused = pytest.raises(ValueError, match="as in 100-120, got '2-1'")
    with environment(**{VARIABLE: "file", ITERATIONS: "2-1"}), refused:
        chainermn.create_communicator()


def test_a_file_of_nothing(tmp_path: Path) -> None:
    offset = Offset(0, 0, at=0)
    nothing = trace.Recorded(0, "host", [], Clock(offset, offset))
    trace.write(tmp_path / "empty.json", [nothing])
    assert trace.read(tmp_path / "empty.json") == ({0: []}, {0: "host"})
    assert json.loads((tmp_path / "empty.json").read_text())["displayTimeUnit"] == "ms"
