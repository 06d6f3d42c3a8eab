"""Two jobs with one folder. Here each rank is a job of its own."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import socket
import sys
import warnings
from pathlib import Path
from typing import Any, NoReturn

import pytest

import chainermn
from chainermn.extensions import folder_lock
from chainermn.extensions.folder_lock import FolderLock
from libs.chainermn.tests.extensions import training


@pytest.mark.mpi(3)
def test_another_job_is_refused_on_all_its_ranks(comm: Any, shared_tmp_path: Path) -> None:
    job = comm.split(min(comm.rank, 1), comm.rank)  # rank 0; ranks 1 and 2
    folder = shared_tmp_path / "new" / "out"
    lock, holder = FolderLock(job, "snapshot"), comm.bcast_obj(os.getpid())
    if comm.rank == 0:
        lock.acquire(folder)
    comm.allgather_obj(None)
    if comm.rank > 0:
        place = f"{folder}: process {holder} on host '{socket.gethostname()}'"
        expected = rf"another job writes into {re.escape(place)} holds \.snapshot\.lock\. Use an"
        with pytest.raises(RuntimeError, match=expected):
            lock.acquire(folder, seconds=0)
        FolderLock(job, "another").acquire(folder, seconds=0)
        FolderLock(job, "snapshot").acquire(shared_tmp_path, seconds=0)
    comm.allgather_obj(None)
    lock.release()
    comm.allgather_obj(None)
    if comm.rank > 0:
        lock.acquire(folder, seconds=0)


@pytest.mark.mpi(2)
def test_rank_0_says_for_whom_it_waits(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_lock, "SECONDS_UNTIL_SAID", 0.0)
    job = comm.split(comm.rank, 0)
    lock = FolderLock(job, "snapshot")
    if comm.rank == 0:
        lock.acquire(shared_tmp_path)
        comm.send_obj(None, 1)
        assert comm.recv_obj(1) == (
            f"chainermn: another job writes into {shared_tmp_path}: process {os.getpid()} on host "
            f"'{socket.gethostname()}'; waiting up to 90 s for it to end\n"
        )
        lock.release()
        return

    class Told:
        text = ""

        def write(self, text: str) -> None:
            self.text += text

        def flush(self) -> None:
            comm.send_obj(self.text, 0)

    comm.recv_obj(0)
    monkeypatch.setattr(sys, "stderr", Told())
    lock.acquire(shared_tmp_path, seconds=90)


@pytest.mark.mpi(2)
def test_one_process_may_hold_it_several_times(comm: Any, shared_tmp_path: Path) -> None:
    job = comm.split(comm.rank, 0)
    first, second = FolderLock(job, "x"), FolderLock(job, "x")

    def refused() -> bool:
        comm.allgather_obj(None)
        is_refused = False
        if comm.rank == 1:
            try:
                FolderLock(job, "x").acquire(shared_tmp_path, seconds=0)
            except RuntimeError:
                is_refused = True
        return bool(comm.bcast_obj(is_refused, root=1))

    if comm.rank == 0:
        first.acquire(shared_tmp_path)
        second.acquire(shared_tmp_path / "." / "link" / "..")
        first.acquire(shared_tmp_path)
        first.release()
    assert refused()
    if comm.rank == 0:
        del second  # as if its trainer had never run
    assert not refused()


@pytest.mark.mpi(2)
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_child_does_not_keep_it(comm: Any, shared_tmp_path: Path) -> None:
    lock = FolderLock(comm.split(comm.rank, 0), "x")
    reader, writer = os.pipe()
    child = None
    if comm.rank == 0:
        lock.acquire(shared_tmp_path)
        child = os.fork()
        if child == 0:
            os.close(writer)
            os.read(reader, 1)
            os._exit(0)
        lock.release()
    comm.allgather_obj(None)
    try:
        if comm.rank == 1:
            lock.acquire(shared_tmp_path)
        comm.allgather_obj(None)
    finally:
        os.close(writer)
        os.close(reader)
    if child:
        os.waitpid(child, 0)


@pytest.mark.mpi(2)
def test_copying_the_folder_does_not_release_it(comm: Any, shared_tmp_path: Path) -> None:
    lock = FolderLock(comm.split(comm.rank, 0), "x")
    if comm.rank == 0:
        lock.acquire(shared_tmp_path / "out")
        shutil.copytree(shared_tmp_path / "out", shared_tmp_path / "backup")
    comm.allgather_obj(None)
    if comm.rank == 1:
        with pytest.raises(RuntimeError, match="another job writes into"):
            lock.acquire(shared_tmp_path / "out", seconds=0)
        lock.acquire(shared_tmp_path / "backup", seconds=0)
    comm.allgather_obj(None)


@pytest.mark.mpi(3)
def test_waiting_ranks_do_not_look_stalled(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = comm.split(min(comm.rank, 1), comm.rank)
    lock = FolderLock(job, "x")
    if comm.rank == 0:
        lock.acquire(shared_tmp_path)
    comm.allgather_obj(None)
    if comm.rank == 0:
        comm.recv_obj(2)
        lock.release()
    else:
        calls, bcast_obj = iter(range(1000)), job.bcast_obj

        def count(*args: Any, **options: Any) -> Any:
            if next(calls) == 1:
                comm.send_obj("the first call has ended", 0)
            return bcast_obj(*args, **options)

        if comm.rank == 2:
            monkeypatch.setattr(job, "bcast_obj", count)
        lock.acquire(shared_tmp_path, seconds=90)


@pytest.mark.mpi(1, 2)
def test_a_file_system_without_locks(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> NoReturn:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    lock = FolderLock(comm, "x")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        lock.acquire(shared_tmp_path)
        lock.acquire(shared_tmp_path)
    expected = f"{shared_tmp_path} cannot be locked ([Errno 37] No locks available), so make sure"
    assert [str(each.message).startswith(expected) for each in said] == [True][comm.rank :]


@pytest.mark.mpi(2)
def test_a_link_is_left_alone(comm: Any, shared_tmp_path: Path) -> None:
    """Where others may write, a lock file could be a link to a file of the user."""
    if comm.rank == 0:
        (shared_tmp_path / "mine").write_text("precious")
        (shared_tmp_path / ".x.lock").symlink_to("mine")
        with pytest.warns(UserWarning, match="cannot be locked"):
            FolderLock(comm.split(0, 0), "x").acquire(shared_tmp_path)
        assert (shared_tmp_path / "mine").read_text() == "precious"
    else:
        comm.split(1, 0)


@pytest.mark.mpi(3)
def test_checkpointers_of_two_jobs(comm: Any, shared_tmp_path: Path) -> None:
    job = comm.split(min(comm.rank, 1), comm.rank)
    trainer = training.make_trainer(job, shared_tmp_path, 2)
    checkpointer = chainermn.create_multi_node_checkpointer("x", job)
    trainer.extend(checkpointer)
    if comm.rank == 0:
        checkpointer.maybe_load(trainer)
    comm.allgather_obj(None)
    if comm.rank > 0:
        with pytest.raises(RuntimeError, match="another job writes into"):
            FolderLock(job, "x").acquire(shared_tmp_path, seconds=0)
    comm.allgather_obj(None)
    if comm.rank == 0:
        trainer.run()
    comm.allgather_obj(None)
    if comm.rank > 0:
        checkpointer.maybe_load(trainer)
        trainer.run()
