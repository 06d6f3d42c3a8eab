"""The script that CI runs: uv installs what nox wants if it can, and otherwise pip does."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CI_RUN = Path(__file__).resolve().parents[2] / ".ci" / "run"
pytestmark = pytest.mark.venv


@pytest.fixture(scope="module")
def wheels() -> Path:
    folder = os.environ.get("CHAINERMN_WHEELHOUSE")
    if folder is None:
        pytest.skip("CHAINERMN_WHEELHOUSE names no wheels; nox -s install_tests sets it")
    pytest.importorskip("ensurepip", reason="without it there is no pip that could install uv")
    return Path(folder)


def script(path: Path, *lines: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)


def run_ci(checkout: Path, for_pip: Path, for_uv: Path) -> str:
    """Run CI's script with a folder of wheels each for pip and uv; `noxw` only prints."""
    (checkout / ".ci").mkdir(parents=True)
    shutil.copyfile(CI_RUN, checkout / ".ci" / "run")
    script(checkout / "noxw", 'echo "noxw $*: ${NOX_DEFAULT_VENV_BACKEND:-default}"')
    (checkout / "ci").mkdir()
    (checkout / "ci" / "cluster").write_text("raise SystemExit('no hosts here')")
    script(checkout / "bin" / "apt-get")  # must not change this machine
    settings = {
        "PATH": f"{checkout / 'bin'}:{os.environ['PATH']}",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": for_pip.as_uri(),
        "UV_OFFLINE": "1",
        "UV_FIND_LINKS": for_uv.as_uri(),
        "UV_CACHE_DIR": str(checkout / "cache"),
    }
    inherited = {k: v for k, v in os.environ.items() if k != "NOX_DEFAULT_VENV_BACKEND"}
    result = subprocess.run(
        ["bash", str(checkout / ".ci" / "run")],
        env=inherited | settings,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_uv_installs(wheels: Path, tmp_path: Path) -> None:
    said = run_ci(tmp_path / "a checkout", for_pip=wheels, for_uv=wheels)
    assert "noxw -s lint docs: uv\n" in said
    assert "noxw -s install_tests trace_tests gpu_rehearsal: uv\n" in said
    assert "left out: pip" not in said


def test_pip_installs_where_uv_finds_no_packages(wheels: Path, tmp_path: Path) -> None:
    said = run_ci(tmp_path / "a checkout", for_pip=wheels, for_uv=tmp_path)
    assert "uv is left out: pip installs" in said
    assert "noxw -s lint docs: default\n" in said


def test_pip_installs_where_there_is_no_uv(wheels: Path, tmp_path: Path) -> None:
    said = run_ci(tmp_path / "a checkout", for_pip=tmp_path, for_uv=wheels)
    assert "uv is left out: pip installs" in said
    assert "noxw -s lint docs: default\n" in said
