"""A timeline that a real job has written."""

from __future__ import annotations

from pathlib import Path

import pytest

from chainermn.testing.mpiexec import run_job


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the timeline of ``train_small.py`` on three ranks."""
    folder = tmp_path_factory.mktemp("recorded")
    path = folder / "timeline.json"
    env = {"CHAINERMN_TIMELINE": str(path), "CHAINERMN_TIMELINE_LAYERS": "1"}
    script = Path(__file__).parent / "train_small.py"
    job = run_job(3, [script, folder], env={**env, "OMP_NUM_THREADS": "1"})
    assert job.returncode == 0, job.stderr
    return path
