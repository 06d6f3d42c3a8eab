"""Each app that is killed and started again ends with the weights of an undisturbed run."""

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest

from apps import small_data
from chainermn.testing.mpiexec import JobResult, run_job

APPS = Path(__file__).resolve().parent
# Seconds after which a job counts as hung, even on a busy machine.
LIMIT = 600
SEED = int(os.environ.get("CHAINERMN_RANDOM_SEED", "0"))
IMAGES = "drawn/train.txt drawn/val.txt -R drawn -m mean.npy -a small -B 4 -E 3 --checkpoint 4"
TRAININGS = {
    "mnist": "mnist --epoch 3 --unit 20 --batchsize 120",
    "imagenet": f"imagenet {IMAGES} --loaderjob 0",
    "imagenet, workers": f"imagenet {IMAGES} --loaderjob 1",
    "cifar": "cifar --epoch 3 --unit 4 --batchsize 9 --examples 80",
    "seq2seq": "seq2seq --epoch 3 --unit 16 --batchsize 14 --hold-out 37 "
    "--source dates.source --target dates.target",
    "dcgan": "dcgan --epoch 3 --unit 4 --batchsize 180",
}

# Trains, and kills each rank at the end of the step of an iteration, before its extensions.
KILLS = """
import os, signal, sys
from chainer.training import StandardUpdater

def update_and_die(self):
    update(self)
    if self.iteration == iteration:
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    folder, iteration = sys.argv.pop(1), int(sys.argv.pop(1))
    sys.path[0] = folder
    import train
    update, StandardUpdater.update = StandardUpdater.update, update_and_die
    train.main()
"""


@pytest.mark.nightly
@pytest.mark.parametrize("training", TRAININGS)
def test_killed_twice_and_started_again_is_as_if_undisturbed(training, tmp_path):
    app, *options = TRAININGS[training].split()
    script = tmp_path / "kills.py"
    script.write_text(KILLS)

    def train(folder: Path, kill_in: int) -> JobResult:
        return run_job(2, [script, APPS / app, str(kill_in), *options], cwd=folder, timeout=LIMIT)

    for folder in (whole := tmp_path / "whole", killed := tmp_path / "killed"):
        folder.mkdir()
        small_data.write(app, folder)
    train(whole, 0).check()
    last = json.loads((whole / "result/log").read_text())[-1]["iteration"]
    # There is a snapshot before the second half.
    draw, half = random.Random(f"{SEED} {training}").randrange, last // 2
    iterations = draw(1, half), draw(half, last)
    place = f"seed {SEED}: {training} is killed in iterations {iterations} of {last}"
    print(place)
    for iteration in iterations:
        ended = train(killed, iteration).check(fails=True)
        assert "Traceback" not in ended.stderr, ended
    assert "resuming after iteration" in train(killed, 0).check().stdout
    with np.load(whole / "result/model.npz") as one, np.load(killed / "result/model.npz") as two:
        assert sorted(one) == sorted(two)
        wrong = [name for name in one if not np.array_equal(one[name], two[name])]
        assert not wrong, f"{place}: {wrong} differ"
