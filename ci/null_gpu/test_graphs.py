"""Training steps are recorded as CUDA graphs; then the host neither waits nor allocates."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ci.null_gpu import build, waits

if reason := build.why_not():
    pytest.skip(reason, allow_module_level=True)

ROOT = build.HERE.parents[1]
N_STEPS = 20
#: What a relaxed capture may do besides enqueueing: not wait, and not load kernels.
ALLOCATIONS = {"cudaMalloc", "cudaHostAlloc"}

SCRIPT = """
import json, sys
import chainer
from chainer.training import StandardUpdater, Trainer
from libs.chainer_fast.tests import models_for_graphs as models

device = chainer.get_device("@cupy:0")
device.use()

def train(make, optimizer, folder, n_steps):
    model = chainer.links.Classifier(make())
    model.to_device(device)
    optimizer.setup(model)
    if make is models.Half:
        optimizer.use_fp32_update()
        optimizer.loss_scaling()
    optimizer.use_cuda_graphs()
    x, t = models.batches(model.predictor, 1)[0]
    batches = chainer.iterators.SerialIterator(list(zip(x, t)), len(x))
    updater = StandardUpdater(batches, optimizer, device=device)
    Trainer(updater, (n_steps, "iteration"), out=folder).run()
    graphs = optimizer.cuda_graphs
    return graphs.n_eager, graphs.n_recorded, graphs.n_launched

sgd, adam = chainer.optimizers.SGD, chainer.optimizers.Adam
cases = [(models.Perceptron, adam()), (models.Images, sgd()), (models.Half, sgd())]
cases.append((models.Words, sgd()))
print(json.dumps([train(*case, sys.argv[1], int(sys.argv[2])) for case in cases]))
"""


def test_the_host_waits_for_nothing_once_graphs_are_launched(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "out"), str(N_STEPS)]
    environment = build.environment(1, notes)
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    found = waits.read(notes)
    of_each = json.loads(done.stdout)
    # Adam's states and float32 copies are new after the first step, so counting starts again.
    assert of_each == [[6, 1, 14], [5, 1, 15], [6, 1, 14], [5, 1, 15]]
    counts = found.counts[0]
    n_launched = sum(n for *_, n in of_each)
    assert counts.captures == 4
    # Two steps by each graph were compared with eager ones.
    assert counts.replays == n_launched + 2 * 4
    assert_no_waits(found)


OF_RANKS = """
import sys
import chainer, numpy as np
from chainer.training import StandardUpdater, Trainer
import chainermn

comm = chainermn.create_communicator("pure_nccl")
device = chainer.get_device(f"@cupy:{comm.intra_rank}")
device.use()
model = chainer.links.Classifier(chainer.Sequential(*map(chainer.links.Linear, [9, 99], [99, 2])))
model.to_device(device)
sgd = chainer.optimizers.MomentumSGD()
optimizer = chainermn.create_multi_node_optimizer(sgd, comm, overlap=sys.argv[1] == "overlap")
optimizer.setup(model)
optimizer.use_cuda_graphs()
data = [(np.ones(9, "f"), np.int32(1))] * 80
updater = StandardUpdater(chainer.iterators.SerialIterator(data, 2), optimizer, device=device)
Trainer(updater, (int(sys.argv[3]), "iteration"), out=sys.argv[2]).run()
assert sgd.cuda_graphs.n_launched == 14, sgd.cuda_graphs.n_launched
"""


@pytest.mark.parametrize("way", ["plain", "overlap"])
def test_nor_do_several_ranks(way: str, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    arguments = ["-c", OF_RANKS, way, str(tmp_path / "out"), str(N_STEPS)]
    command = ["mpiexec", "-n", "2", sys.executable, *arguments]
    environment = build.environment(2, notes)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    found = waits.read(notes)
    assert {each.replays for each in found.counts.values()} == {14 + 2}
    assert_no_waits(found)


def assert_no_waits(found: waits.Waits) -> None:
    """Check that captures only allocate, and that launches of graphs wait for nothing."""
    assert {each.call for each in found.in_captures()} <= ALLOCATIONS
    late = [each for each in found.in_iterations() if each.iteration >= N_STEPS - 12]
    assert waits.show(late) == waits.show([])


RANKS_APART = """
import random, sys, warnings
import chainer, cupy, numpy as np
import chainer.functions as F, chainer.links as L
import chainermn

comm = chainermn.create_communicator("pure_nccl")
device = chainer.get_device(f"@cupy:{comm.intra_rank}")
device.use()
what = sys.argv[1]

class Looks(chainer.FunctionNode):
    def forward(self, inputs):
        return (inputs[0].copy(),)

    def backward(self, indexes, grad_outputs):
        if what == "all look" or (what == "one looks" and comm.rank == 0):
            float(grad_outputs[0].array.ravel()[0])
        return grad_outputs

class Model(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.first, self.second = L.Linear(9, 2000), L.Linear(2000, 2)

    def forward(self, x, t):
        if comm.rank == 0 and what == "one reports":
            chainer.report({"n": len(x)}, self)
        if comm.rank == 0 and what == "one draws":
            random.random()
        h, = Looks().apply((F.relu(self.first(x)),))
        return F.softmax_cross_entropy(self.second(h), t)

model = Model()
model.to_device(device)
sgd = chainer.optimizers.MomentumSGD()
overlap = sys.argv[2] == "overlap"
optimizer = chainermn.create_multi_node_optimizer(sgd, comm, overlap=overlap).setup(model)
optimizer.use_cuda_graphs()
reporter = chainer.Reporter()
reporter.add_observer("main", model)
with reporter, warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    for step in range(30):
        if step == 20 and comm.rank == 1 and what == "one fails":
            raise ValueError("of one rank")
        n = 3 if comm.rank == 1 and what == "other batches" and step % 7 == 6 else 4
        optimizer.update(model, cupy.ones((n, 9), "f"), cupy.ones(n, "i"))
graphs = sgd.cuda_graphs
if what == "other batches":
    assert graphs.n_launched >= 18, graphs.n_launched
else:
    assert (graphs.n_launched, graphs.are_on) == (0, False)
    assert comm.rank or "no CUDA graphs: rank 0: " in str(told[-1].message), told
assert sgd.t == 29  # the first makes replicas equal
"""


@pytest.mark.parametrize("way", ["plain", "overlap"])
@pytest.mark.parametrize(
    "what", ["all look", "one looks", "one reports", "one draws", "other batches"]
)
def test_ranks_that_cannot_do_the_same(what: str, way: str, tmp_path: Path) -> None:
    command = ["mpiexec", "-n", "2", sys.executable, "-c", RANKS_APART, what, way]
    environment = build.environment(2, tmp_path)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_rank_that_fails_while_others_launch_graphs(tmp_path: Path) -> None:
    command = ["mpiexec", "-n", "2", sys.executable, "-c", RANKS_APART, "one fails", "plain"]
    environment = build.environment(2, tmp_path)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode != 0
    assert "ValueError: of one rank" in done.stderr


def test_what_a_gpu_is_to_prove_can_be_recorded() -> None:
    """Go through the tests for GPUs, without their numbers."""
    tests = "libs/chainer_fast/tests/gpu/test_graphs.py"
    command = [sys.executable, str(build.HERE), sys.executable, "-m", "pytest", "-q", tests]
    command += ["-m", "gpu", "-p", "no:cacheprovider", "--tb=short"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout
    assert " failed" not in done.stdout
