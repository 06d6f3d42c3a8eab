"""Each app stops with a checkpoint when it is sent SIGUSR1, and resumes from it."""

import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from chainermn.extensions import StopOnSignal
from chainermn.testing.modules import import_modules
from chainermn.testing.mpiexec import Job, run_job

APPS = Path(__file__).resolve().parent
# Seconds after which a job counts as hung, even on a busy machine.
LIMIT = 600

# Runs the script named in its arguments. In the second iteration, one rank waits for SIGUSR1.
WAITS = """
import os, runpy, signal, sys, time
from pathlib import Path
from chainer.training import StandardUpdater

def update_and_wait(self):
    update(self)
    if self.iteration == 2:
        received = []

        def handle(*arguments):
            received.append(handler(*arguments))

        handler = signal.signal(signal.SIGUSR1, handle)
        try:
            Path("trains").touch(exist_ok=False)
        except FileExistsError:  # by the other rank
            return
        while not received and signal.SIGUSR1 not in signal.sigpending():
            time.sleep(0.01)

if __name__ == "__main__":
    update, StandardUpdater.update = StandardUpdater.update, update_and_wait
    del sys.argv[0]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


long_only = pytest.mark.skipif(
    "CHAINERMN_LONG_TESTS" not in os.environ,
    reason="CHAINERMN_LONG_TESTS is not set: the other apps have the same line",
)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> list[str | Path]:
    """Return options that name a few images."""
    root = tmp_path_factory.mktemp("data") / "drawn"
    import_modules(APPS / "imagenet", ["generated"]).generated.create(root, 120, 20)
    return [root / "train.txt", root / "val.txt", "--root", root]


@pytest.fixture(scope="module")
def dates(tmp_path_factory) -> list[str | Path]:
    """Return options that name a few lines of text."""
    folder = tmp_path_factory.mktemp("dates")
    paths = folder / "dates.source", folder / "dates.target"
    import_modules(APPS / "seq2seq", ["generated"]).generated.write(*paths, 203, 1)
    return ["--source", paths[0], "--target", paths[1]]


@pytest.mark.each_mpi
@pytest.mark.parametrize(
    ("script", "data", "options"),
    [
        ("mnist/train.py", None, "--epoch 1 --unit 20"),
        ("imagenet/train.py", "drawn", "--arch small --epoch 2 --batchsize 12 --loaderjob 1"),
        ("seq2seq/train.py", "dates", "--unit 16 --batchsize 8 --hold-out 37 --epoch 1"),
        pytest.param(
            "mnist/train_model_parallel.py",
            None,
            "--epoch 1 --unit 20 --batchsize 120",
            marks=long_only,
        ),
        pytest.param(
            "cifar/train.py",
            None,
            "--examples 60 --unit 4 --epoch 3 --batchsize 9",
            marks=long_only,
        ),
        pytest.param("dcgan/train.py", None, "--unit 4 --epoch 1 --batchsize 60", marks=long_only),
    ],
    ids=["mnist", "imagenet", "seq2seq", "model_parallel", "cifar", "dcgan"],
)
def test_stopped_and_started_again_is_as_if_undisturbed(script, data, options, request, tmp_path):
    command = [APPS / script, *(request.getfixturevalue(data) if data else []), *options.split()]
    command += ["--out", "result"]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    whole.mkdir()
    stopped.mkdir()
    run_job(2, command, cwd=whole, timeout=LIMIT).check()

    waits = tmp_path / "waits.py"
    waits.write_text(WAITS)
    job = Job(2, [waits, *command], cwd=stopped)
    deadline = time.monotonic() + LIMIT
    while not (stopped / "trains").exists():
        if job.process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(job.kill())
        time.sleep(0.05)
    job.process.send_signal(signal.SIGUSR1)
    ended = job.wait(LIMIT)
    assert (ended.returncode, ended.left_behind) == (StopOnSignal.exit_code, []), ended
    (iteration,) = re.findall(r"got SIGUSR1: the checkpoint of iteration (\d+) is", ended.stderr)

    resumed = run_job(2, command, cwd=stopped, timeout=LIMIT).check()
    assert f"resuming after iteration {iteration}, epoch " in resumed.stdout
    with np.load(whole / "result/model.npz") as one, np.load(stopped / "result/model.npz") as two:
        assert sorted(one) == sorted(two)
        for name in one:
            # When imagenet stops, it also averages these over the ranks, which rounds them.
            is_rounded = script == "imagenet/train.py" and name.endswith(("avg_mean", "avg_var"))
            rtol = 1e-5 if is_rounded else 0
            np.testing.assert_allclose(two[name], one[name], rtol, err_msg=name)
