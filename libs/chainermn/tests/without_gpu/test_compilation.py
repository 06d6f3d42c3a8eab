"""Kernels, which one rank compiles for all ranks on its host."""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock
from mpi4py import MPI

from chainermn.transport.gpu import compilation
from chainermn.transport.gpu.device import THREADS, Gpu

WORLD = MPI.COMM_WORLD


class CupyWithCache:
    """A stand-in for CuPy that compiles only kernels missing from its cache on disk."""

    def __init__(self, cache: Path) -> None:
        self.cuda = SimpleNamespace(Device=lambda: SimpleNamespace(id=0))
        self.compiled: Counter[str] = Counter()
        self.launched: list[Any] = []
        self._cache = cache

    def RawModule(self, code: str, options: tuple[str, ...]) -> Any:
        return SimpleNamespace(get_function=lambda name: self._get(code, name))

    def _get(self, code: str, name: str) -> Any:
        file = self._cache / code
        if not file.exists():
            time.sleep(0.1)  # meanwhile, other ranks find nothing either
            self.compiled[code] += 1
            file.touch()
        return lambda *arguments: self.launched.append((name, *arguments))


@pytest.mark.mpi(1, 3)
def test_once_per_host(shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(shared_tmp_path))
    monkeypatch.setattr(compilation, "SECONDS_TO_WAIT", 600)
    cupy = CupyWithCache(shared_tmp_path)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    gpu = Gpu()
    WORLD.Barrier()
    for code in ("one", "other", "one"):
        gpu.run(code, "gather", 5, [code])
    everywhere = sum(WORLD.allgather(cupy.compiled), Counter())
    assert everywhere == {"one": 1, "other": 1}
    assert cupy.launched == [
        ("gather", (5,), (THREADS,), (code,)) for code in ("one", "other", "one")
    ]


def test_without_a_cache_on_disk_no_rank_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    with compilation.one_rank_at_a_time():
        assert list(tmp_path.iterdir())
    for file in tmp_path.iterdir():
        file.unlink()
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "1")
    with compilation.one_rank_at_a_time():
        assert not list(tmp_path.iterdir())


def test_a_cache_that_cannot_be_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "file"))
    with compilation.one_rank_at_a_time():
        pass


def test_nobody_has_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("CUPY_CACHE_DIR", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with compilation.one_rank_at_a_time():
        pass


def test_a_lock_that_is_never_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compilation, "SECONDS_TO_WAIT", 0.1)
    with compilation.one_rank_at_a_time():
        (lock,) = tmp_path.iterdir()
    with FileLock(lock), compilation.one_rank_at_a_time():
        pass


def test_an_error_is_raised_and_releases_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    with pytest.raises(OSError, match="no NVRTC"), compilation.one_rank_at_a_time():
        raise OSError("no NVRTC")
    (lock,) = tmp_path.iterdir()
    with FileLock(lock, timeout=0):
        pass
