"""Pools whose ranks never reach their first test."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from chainermn.testing import rank_pool
from chainermn.testing.rank_pool import RankPool

Failed = pytest.fail.Exception
pytestmark = pytest.mark.each_mpi


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """Check that neither processes nor files of the pool stay behind."""
    monkeypatch.setattr(rank_pool.tempfile, "tempdir", str(tmp_path))
    before = psutil.Process().children()  # pools of other tests
    yield
    assert list(tmp_path.glob("mpi*")) == []
    started = [child for child in psutil.Process().children() if child not in before]
    assert [child for child in started if rank_pool.__name__ in child.cmdline()] == []


def test_tests_that_cannot_be_collected(tmp_path: Path) -> None:
    broken = tmp_path / "test_broken.py"
    broken.write_text("import nothing_of_this_name\n")
    with pytest.raises(Failed, match=r"\(rank 0\) could not collect the tests") as raised:
        RankPool(1, [str(broken), "-p", "no:cacheprovider"])
    assert "No module named 'nothing_of_this_name'" in str(raised.value)


def test_ranks_that_end_before_they_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPI4PY_LIBMPI", "/nowhere/libmpi.so")
    with pytest.raises(Failed, match="a rank of 1 did not connect") as raised:
        RankPool(1, [])
    assert "cannot load MPI library" in str(raised.value)
