"""Snapshot writers with a thread or process: what they write, when they end, how they fail."""

import functools
import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import chainer
import numpy as np
import pytest
from chainer.serializers import save_npz
from chainer.training import extensions
from chainer.training.extensions.snapshot_writers import (
    ProcessQueueWriter,
    ProcessWriter,
    SimpleWriter,
    ThreadQueueWriter,
    ThreadWriter,
)

THREADS = [ThreadWriter, ThreadQueueWriter]
PROCESSES = [ProcessWriter, ProcessQueueWriter]
# Python's warning against forking with threads, which queues have.
forks = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")


@pytest.fixture
def start_method(request):
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(request.param, force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


def save_when_told(pipes, path, target):
    Path(pipes, Path(path).name).read_text()
    save_npz(path, target)


def fail(path, target):
    raise OSError(28, "No space left on device", Path(path).name)


def check_late_writing(writer, tmp_path):
    """Check a file that is written after training has changed its arrays, and ``n_retains``."""
    pipes = tmp_path / "pipes"
    pipes.mkdir()
    writer = writer(savefun=functools.partial(save_when_told, pipes))
    model = chainer.Link()
    model.add_persistent("x", np.zeros(3))
    snapshot = extensions.snapshot_object(model, "at_{.iteration}", writer=writer, n_retains=1)
    snapshot.initialize(SimpleNamespace(out=tmp_path))
    for iteration in (1, 2):
        os.mkfifo(pipes / f"at_{iteration}")
        model.x[...] = iteration
        snapshot(SimpleNamespace(out=tmp_path, iteration=iteration))
        model.x[...] = -1
        (pipes / f"at_{iteration}").write_text("write")
    snapshot.finalize()
    (file,) = tmp_path.glob("at_*")
    assert (file.name, np.load(file)["x"].tolist()) == ("at_2", [2, 2, 2])
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("writer", THREADS)
def test_a_thread_writes_the_state_of_its_iteration_and_ends(writer, tmp_path):
    check_late_writing(writer, tmp_path)
    assert threading.active_count() == 1


@forks
@pytest.mark.parametrize(
    ("writer", "start_method"),
    [
        (ProcessWriter, "fork"),
        (ProcessQueueWriter, "fork"),
        pytest.param(ProcessWriter, "forkserver", marks=pytest.mark.nightly),
        (ProcessQueueWriter, "forkserver"),
    ],
    indirect=["start_method"],
)
def test_a_process_writes_the_state_of_its_iteration_and_ends(writer, tmp_path, start_method):
    check_late_writing(writer, tmp_path)


def test_a_writer_without_a_thread_copies_nothing(tmp_path):
    x = np.zeros(3)
    written = []
    save = lambda path, target: (written.append(target["x"]), save_npz(path, target))  # noqa: E731
    SimpleWriter(save)("f", tmp_path, {"x": x})
    assert written[0] is x


@pytest.mark.parametrize("writer", [*THREADS, *PROCESSES])
def test_nothing_starts_before_the_first_snapshot(writer):
    unused = writer()
    assert threading.active_count() == 1
    assert multiprocessing.active_children() == []
    unused.finalize()


@pytest.mark.parametrize("writer", THREADS)
def test_the_next_snapshot_raises_the_failure_of_a_thread_once(writer, tmp_path):
    failing = writer(savefun=fail)
    failing("a", tmp_path, {"x": np.zeros(3)})
    for thread in set(threading.enumerate()) - {threading.main_thread()}:
        thread.join()
    with pytest.raises(OSError, match="No space left on device: 'a'"):
        failing("b", tmp_path, {"x": np.zeros(3)})
    failing.finalize()
    failing("c", tmp_path, {"x": np.zeros(3)})
    with pytest.raises(OSError, match="No space left on device: 'c'"):
        failing.finalize()
    failing.finalize()


@forks
@pytest.mark.parametrize("start_method", ["fork"], indirect=True)
@pytest.mark.parametrize("writer", PROCESSES)
def test_the_failure_of_a_process_is_raised(writer, tmp_path, start_method, capfd):
    failing = writer(savefun=fail)
    failing("a", tmp_path, {"x": np.zeros(3)})
    with pytest.raises(RuntimeError, match=rf"for {writer.__name__} ended with exit code 1"):
        failing.finalize()
    failing.finalize()
    assert "No space left on device: 'a'" in capfd.readouterr().err


@pytest.mark.parametrize("writer", THREADS)
def test_a_writer_can_write_for_another_trainer(writer, tmp_path):
    again = writer()
    for name in ("a", "b"):
        again(name, tmp_path, {"x": np.full(1, 5)})
        again.finalize()
        assert np.load(tmp_path / name)["x"] == 5


def test_a_script_that_raises_writes_its_snapshots_and_ends(tmp_path):
    script = """
from chainer.training.extensions.snapshot_writers import *
for name in "ThreadWriter", "ThreadQueueWriter", "ProcessQueueWriter":
    globals()[name]()(name, ".", {})
raise SystemExit(3)
"""
    ended = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, timeout=300)
    assert ended.returncode == 3
    files = ["ProcessQueueWriter", "ThreadQueueWriter", "ThreadWriter"]
    assert sorted(os.listdir(tmp_path)) == files
