"""A copy of each app trains, outside the repository."""

import importlib.util
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from apps import small_data
from chainermn.notes import without_notes
from chainermn.testing.mpiexec import direct_environment, mpi_flavor, mpiexec_command

APPS = Path(__file__).resolve().parent
# Seconds after which a job counts as hung, even on a busy machine.
LIMIT = 600


def stop(process: subprocess.Popen) -> None:
    """Kill the leader of a session, and everything that it has started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def make_copy(app: str, folder: Path) -> Path:
    """Copy an app, so that its files can be written; return the copy."""
    ignored = shutil.ignore_patterns(".*", "__pycache__", "result*")
    shutil.copytree(APPS / app, folder, ignore=ignored)
    for path in (folder, *folder.rglob("*")):
        path.chmod(path.stat().st_mode | stat.S_IWUSR)
    return folder


# Options of train.py, and the number of its last iteration.
TRAININGS = {
    "mnist": ("--epoch 1 --unit 20 --batchsize 350", 3),
    "imagenet": (  # as typed for the original's example
        "--test -a small -B 2 -b 10 -j 0 -E 2 -R drawn -m mean.npy -o result drawn/train.txt "
        "drawn/val.txt",
        10,
    ),
    "cifar": ("--epoch 1 --unit 4 --batchsize 9 --examples 40", 2),
    "seq2seq": (
        "--epoch 1 --unit 16 --batchsize 26 --hold-out 99 --source dates.source "
        "--target dates.target",
        2,
    ),
    "dcgan": ("--epoch 1 --unit 4 --batchsize 360", 2),
}


@pytest.mark.each_mpi
@pytest.mark.parametrize("app", TRAININGS)
def test_mpiexec_starts_the_script_of_a_copy(app, tmp_path):
    """The script itself: it is executable, and mpiexec finds Python by its first line."""
    copy = make_copy(app, tmp_path / "copy")
    options, iterations = TRAININGS[app]
    small_data.write(app, copy)
    job = subprocess.run(
        mpiexec_command(2, [copy / "train.py", *options.split()], python=False),
        cwd=copy,
        env=direct_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert (job.returncode, without_notes(job.stderr)) == (0, ""), job
    assert "ranks: 2, hosts: 1, " in job.stdout
    (log,) = copy.glob("result/**/log")
    assert json.loads(log.read_text())[-1]["iteration"] == iterations


# Collects the tests of each copy as "python -m pytest" does there. Imports other packages once.
COLLECT = """
import os, sys, warnings
import chainer, optuna, pytest, sacrebleu, sklearn.datasets

warnings.filterwarnings("ignore", "This process .* is multi-threaded")  # and forks
for folder in sys.argv[1:]:
    print(end="\\0", flush=True)
    if os.fork() == 0:
        os.chdir(folder)
        sys.path[0] = folder
        code = pytest.main(["--collect-only", "-q", "--strict-markers"])
        sys.stdout.flush()
        os._exit(code)
    assert os.wait()[1] == 0, folder
"""


def test_copied_tests_are_collected(tmp_path):
    """Nothing of the repository configures pytest there."""
    copies = [make_copy(app, tmp_path / app) for app in TRAININGS]
    shown = subprocess.run(
        [sys.executable, "-W", "error", "-c", COLLECT, *copies],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert shown.returncode == 0, shown
    assert "warning" not in shown.stdout
    for copy, lines in zip(copies, shown.stdout.split("\0")[1:], strict=True):
        collected = {line.partition("::")[0] for line in lines.splitlines() if "::" in line}
        # Where there is PyTorch, this is collected, too.
        needs_pytorch = {"test_torchvision.py"}
        names = {path.name for path in copy.glob("test_*.py")}
        assert collected | needs_pytorch == names | needs_pytorch


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
