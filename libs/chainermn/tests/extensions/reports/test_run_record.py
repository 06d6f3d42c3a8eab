"""The record of how a run was started, written once for all ranks."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from pathlib import Path

import chainer
import numpy as np
import pytest

import chainermn
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.extensions import record_run


@pytest.mark.mpi(1, 3)
def test_what_is_written(comm: CommunicatorBase, shared_tmp_path: Path) -> None:
    before = datetime.datetime.now().astimezone().replace(microsecond=0)
    out = shared_tmp_path / "new/result"
    record_run(comm, {"unit": 5, "out": out, "resume": None}, out)
    record = json.loads((out / "run.json").read_text())
    assert record["arguments"] == {"unit": 5, "out": str(out), "resume": None}
    assert record["ranks"] == len(record["hosts"]) == comm.size
    versions = record["versions"]
    assert versions["chainermn"] == chainermn.__version__
    assert versions["chainer"] == chainer.__version__
    assert versions["numpy"] == np.__version__
    assert versions["python"] == sys.version.split()[0]
    assert "MPI" in versions["mpi"]
    assert datetime.datetime.fromisoformat(record["started"]) >= before
    assert [file.name for file in out.iterdir()] == ["run.json"]


@pytest.mark.mpi(1, 2)
def test_folder_that_cannot_be_made(comm: CommunicatorBase, shared_tmp_path: Path) -> None:
    (shared_tmp_path / "file").touch()
    expected = OSError if comm.rank == 0 else RuntimeError
    with pytest.raises(expected, match="file"):
        record_run(comm, {}, shared_tmp_path / "file/result")


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.mpi(2)
def test_commit_of_the_script(shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    comm = chainermn.create_communicator("naive")
    folder, out = shared_tmp_path / "project", shared_tmp_path / "result"
    script = folder / "train.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--unit", "5"])

    def record() -> dict[str, object]:
        comm.mpi_comm.Barrier()
        record_run(comm, {"name": "é"}, out)
        found = json.loads((out / "run.json").read_text())
        comm.mpi_comm.Barrier()
        assert found["command"] == [sys.executable, str(script), "--unit", "5"]
        assert found["arguments"] == {"name": "é"}
        git_says: dict[str, object] = found["git"]
        return git_says

    if comm.rank == 0:
        folder.mkdir()
        script.write_text("import chainermn\n")
    assert record() is None
    if comm.rank == 0:
        git(folder, "init", "--quiet")
        git(folder, "add", ".")
        git(folder, "commit", "--quiet", "-m", "first")
        os.utime(script, (0, 0))  # git would note this in its index
    comm.mpi_comm.Barrier()
    commit, index = git(folder, "rev-parse", "HEAD"), (folder / ".git/index").read_bytes()
    assert record() == {"commit": commit, "changed": False}
    assert (folder / ".git/index").read_bytes() == index
    if comm.rank == 0:
        script.write_text("import chainermn  # more\n")
    assert record() == {"commit": commit, "changed": True}
