"""A copy of each app trains, by the commands in its README."""

import importlib.util
import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from chainermn.testing.mpiexec import direct_environment, mpi_flavor

APPS = Path(__file__).resolve().parent
# Seconds after which a job counts as hung, even on a busy machine.
LIMIT = 600


def stop(process: subprocess.Popen) -> None:
    """Kill the leader of a session, and everything that it has started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.venv
@pytest.mark.skipif(
    "CHAINERMN_WHEELHOUSE" not in os.environ,
    reason="CHAINERMN_WHEELHOUSE names no folder of wheels to install a copy from",
)
@pytest.mark.skipif(
    not importlib.util.find_spec("ensurepip"), reason="this Python makes no environments (venv)"
)
@pytest.mark.parametrize(
    ("app", "out", "is_right"),
    [
        ("mnist", "digits/result", lambda row: row["validation/main/accuracy"] >= 0.97),
        ("imagenet", "images/result/test", lambda row: row["iteration"] == 10),
        ("cifar", "shapes/result", lambda row: row["iteration"] == 36),
        ("seq2seq", "dates/result", lambda row: row["validation/main/exact"] > 0.8),
        ("dcgan", "art/result", lambda row: row["validation/distance"] < 20),
    ],
    ids=["mnist", "imagenet", "cifar", "seq2seq", "dcgan"],
)
def test_copied_app_trains(app, out, is_right, tmp_path):
    if mpi_flavor() == "openmpi":
        pytest.skip("a copy brings an MPI of its own: tested where this environment has MPICH")
    readme = (APPS / app / "README.md").read_text(encoding="utf-8")
    (commands,) = re.findall(r"as they are\. -->\n```sh\n(.*?)```", readme, re.DOTALL)
    # A copy of a read-only folder is read-only, too.
    commands = commands.replace("\n", "\nchmod -R u+w ~\n", 1)
    environment = {
        **direct_environment(),
        "HOME": str(tmp_path),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": Path(os.environ["CHAINERMN_WHEELHOUSE"]).as_uri(),
    }
    environment.pop("PYTHONPATH", None)
    output = tmp_path / "output"
    with output.open("wb") as written:
        shell = subprocess.Popen(
            ["sh", "-ec", commands],
            cwd=APPS.parent,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            shell.wait(timeout=LIMIT)
        finally:
            stop(shell)
    assert shell.returncode == 0, output.read_text()
    row = json.loads((tmp_path / out / "log").read_text())[-1]
    assert is_right(row), row
