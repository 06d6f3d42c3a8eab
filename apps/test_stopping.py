"""Each app stops with a checkpoint when it is sent SIGUSR1, and resumes from it."""

import contextlib
import io
import os
import re
import signal
import sys
import time
from functools import partial
from pathlib import Path

import matplotlib.font_manager  # noqa: F401  - its very first import writes to standard error
import numpy as np
import pytest
from chainer.training import StandardUpdater

import chainermn
from chainermn.extensions import StopOnSignal
from chainermn.testing.modules import import_modules
from chainermn.testing.mpiexec import Job

APPS = Path(__file__).resolve().parent
# Seconds after which a job counts as hung, even on a busy machine.
LIMIT = 600
DATES = "--source dates.source --target dates.target"
# Where pickle looks for the classes of a script.
MODULES = {
    "cifar": ["data"],
    "dcgan": ["data", "evaluation"],
    "mnist": ["data"],
    "seq2seq": ["corpus", "evaluation", "generated", "subwords", "vocabulary"],
}


@pytest.mark.mpi(2, timeout=LIMIT)
@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("cifar/train.py", "--examples 80 --unit 4 --epoch 2 --batchsize 9"),
        ("dcgan/train.py", "--unit 4 --epoch 2 --batchsize 180"),
        ("mnist/train.py", "--epoch 1 --unit 20"),
        ("mnist/train_model_parallel.py", "--epoch 1 --unit 20 --batchsize 120"),
        ("seq2seq/train.py", f"{DATES} --unit 16 --batchsize 14 --hold-out 37 --epoch 1"),
    ],
    ids=["cifar", "dcgan", "mnist", "model_parallel", "seq2seq"],
)
def test_stopped_and_started_again_is_as_if_undisturbed(
    script, options, shared_tmp_path, monkeypatch, capsys
):
    """One rank gets the signal in the second iteration."""
    monkeypatch.chdir(shared_tmp_path)
    app, name = script.removesuffix(".py").split("/")
    modules = import_modules(APPS / app, [*MODULES[app], name])
    for module in vars(modules).values():
        monkeypatch.setitem(sys.modules, module.__name__, module)
    comm = chainermn.create_communicator("naive")
    if app == "cifar":  # whose drawings take longer than these trainings
        monkeypatch.setattr(modules.data, "TEST_SHAPES", 10)
    if app == "dcgan":  # whose features do
        few = partial(modules.evaluation.train_features, steps=2)
        monkeypatch.setattr(modules.evaluation, "train_features", few)
    if app == "seq2seq":
        if comm.rank == 0:
            modules.generated.write(Path("dates.source"), Path("dates.target"), 203, 1)
        comm.mpi_comm.Barrier()

    def train(out: str) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            vars(modules)[name].main([*options.split(), "--out", out])
        return shown.getvalue()

    train("whole")
    update = StandardUpdater.update

    def update_and_signal(updater: StandardUpdater) -> None:
        update(updater)
        if updater.iteration == 2 and comm.rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    with monkeypatch.context() as patch:
        patch.setattr(StandardUpdater, "update", update_and_signal)
        with pytest.raises(SystemExit) as end:
            train("stopped")
    assert end.value.code == StopOnSignal.exit_code
    said = re.findall(
        r"rank 1 got SIGUSR1: the checkpoint of iteration (\d+) is", capsys.readouterr().err
    )
    assert len(said) == (comm.rank == 0)
    shown = train("stopped")
    if comm.rank == 0:
        assert f"resuming after iteration {said[0]}, epoch " in shown
        with np.load("whole/model.npz") as one, np.load("stopped/model.npz") as two:
            assert sorted(one) == sorted(two)
            for name in one:
                np.testing.assert_array_equal(two[name], one[name], err_msg=name)


# Trains. In the second iteration, one rank waits for SIGUSR1, which mpiexec passes on to the
# ranks, and perhaps to their workers.
WAITS = """
import os, signal, sys, time
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
    sys.path[0] = {here!r}
    import train
    update, StandardUpdater.update = StandardUpdater.update, update_and_wait
    train.main()
"""


@pytest.mark.each_mpi
def test_mpiexec_passes_the_signal_on_and_workers_survive_it(tmp_path):
    here = APPS / "imagenet"
    import_modules(here, ["generated"]).generated.create(tmp_path / "drawn", 60, 10)
    options = "drawn/train.txt drawn/val.txt --root drawn --arch small --epoch 2 --batchsize 12"
    options = [*options.split(), "--loaderjob", "1"]
    waits = tmp_path / "waits.py"
    waits.write_text(WAITS.format(here=str(here)))
    job = Job(2, [waits, *options], cwd=tmp_path)
    deadline = time.monotonic() + LIMIT
    while not (tmp_path / "trains").exists():
        if job.process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(job.kill())
        time.sleep(0.05)
    job.process.send_signal(signal.SIGUSR1)
    ended = job.wait(LIMIT)
    assert (ended.returncode, ended.left_behind) == (StopOnSignal.exit_code, []), ended
    (iteration,) = re.findall(r"got SIGUSR1: the checkpoint of iteration (\d+) is", ended.stderr)
    assert list((tmp_path / "result").glob(f"snapshot_iter_{iteration}.*"))
