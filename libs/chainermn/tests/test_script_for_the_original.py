"""A script written for the ChainerMN in Chainer's wheel does the same here, unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

from chainermn.testing.mpiexec import run_job

SCRIPT = Path(__file__).parent / "scripts" / "written_for_the_original.py"


@pytest.mark.parametrize("ranks", [2, 3])
def test_prints_the_same(ranks: int, tmp_path: Path) -> None:
    printed = []
    for bundled in ("", "1"):
        env = {"CHAINER_COMPAT_BUNDLED_CHAINERMN": bundled, "PYTHONWARNINGS": "ignore"}
        result = run_job(ranks, [SCRIPT, tmp_path], env=env)
        assert result.returncode == 0, result.stderr
        printed.append(result.stdout.split("\n"))
    ours, originals = printed
    assert len(ours) > 30
    assert ours == originals
