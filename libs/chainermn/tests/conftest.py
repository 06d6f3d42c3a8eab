"""Fixtures for tests of what finds and starts mpiexec."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chainermn.launch import mpiexec


@pytest.fixture
def forgets_mpiexec() -> Iterator[None]:
    """Let the test, and those after it, look for mpiexec and for its MPI anew."""
    cached = (mpiexec.find_mpiexec, mpiexec.mpi4py_library, mpiexec.mpiexec_version)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


@pytest.fixture(scope="session")
def flavour() -> str:
    """Return whose library mpi4py loads, whatever mpiexec there is."""
    return "mpich" if "MPICH" in mpiexec.mpi4py_library() else "openmpi"


@pytest.fixture
def only_mpiexec(
    forgets_mpiexec: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Path]:
    """Return a function that makes a shell script the only mpiexec that there is."""
    folder = tmp_path / "only"
    folder.mkdir()
    monkeypatch.setattr(mpiexec.sysconfig, "get_path", lambda name: str(folder))
    monkeypatch.setenv("PATH", str(folder))

    def put(script: str) -> Path:
        path = folder / "mpiexec"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    return put
