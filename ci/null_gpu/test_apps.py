"""Every app runs to its end with ``--gpu``; in iterations, the host waits only if it must."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from ci.null_gpu import build, waits
from ci.null_gpu.waits import Waits

if reason := build.why_not():
    pytest.skip(reason, allow_module_level=True)

APPS = build.HERE.parents[1] / "apps"
LIMIT = 600


def run(folder: Path, script: Path, *options: str, ranks: int = 2) -> Waits:
    """Run a script on some ranks, each with its own GPU."""
    notes = folder / "notes"
    notes.mkdir()
    command = ["mpiexec", "-n", str(ranks), sys.executable, str(script), *options]
    environment = build.environment(ranks, notes)
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return waits.read(notes)


def train(folder: Path, script: str, *options: str, ranks: int = 2) -> Waits:
    return run(folder, APPS / script, "--gpu", "--out", str(folder / "out"), *options, ranks=ranks)


def per_iteration(found: Waits) -> dict[tuple[int, str], float]:
    """Return how often each rank waits per iteration, by the function that waits."""
    times: Counter[tuple[int, str]] = Counter()
    for each in found.recurring():
        # CuPy waits for the stream after each copy to the host; only that counts.
        if each.call != "cudaMemcpyAsync to pageable memory":
            times[each.rank, each.stack[0].split()[-1]] += 1
    return {
        (rank, function): count / (found.iterations[rank] - waits.FIRST)
        for (rank, function), count in times.items()
    }


def show(found: Waits) -> str:
    return "\n" + found.table()


# Each app


@pytest.mark.parametrize("ranks", [1, 2])
def test_mnist(tmp_path: Path, ranks: int) -> None:
    found = train(tmp_path, "mnist/train.py", "--epoch", "1", ranks=ranks)
    assert not found.in_iterations(), show(found)
    # Reports are due only at the end of the epoch.
    last = found.iterations[0]
    assert {each.iteration for each in found.between()} == {last}, show(found)
    assert last == -(-1437 // ranks // 30)


@pytest.mark.parametrize("script", ["train_model_parallel.py", "train_dual_parallel.py"])
def test_mnist_in_two_parts(tmp_path: Path, script: str) -> None:
    found = train(tmp_path, f"mnist/{script}", "--epoch", "1")
    # Ranks wait to send activations by MPI, and to receive them.
    assert per_iteration(found) == {(0, "Wait"): 4, (1, "Wait"): 4}, show(found)


def test_imagenet(tmp_path: Path) -> None:
    options = ["--test", "--mnbn", "--clip", "1", "--ema", "0.9", "--loaderjob", "0"]
    found = train(tmp_path, "imagenet/train.py", *options)
    assert not found.in_iterations(), show(found)


def test_nothing_waits_for_batches_that_are_prefetched(tmp_path: Path) -> None:
    options = ["--test", "--mixed16", "--loaderjob", "2", "--prefetch"]
    found = train(tmp_path, "imagenet/train.py", *options, ranks=1)
    assert {function for _, function in per_iteration(found)} == {"check_nan_in_grads"}, show(
        found
    )
    copied = [each for each in found.waits if "prefetch" in each.phase]
    assert {"cudaMalloc"} <= {each.call for each in copied} <= {*waits.GROWING}, show(found)
    # Pinned memory, and memory of the GPU for the batches in advance, is used again and again.
    assert not {*copied} & {*found.between()}, show(found)


def test_mixed_precision(tmp_path: Path) -> None:
    found = train(tmp_path, "imagenet/train.py", "--test", "--mixed16", "--loaderjob", "0")
    # To learn whether to skip the step.
    once = {(0, "check_nan_in_grads"): 1, (1, "check_nan_in_grads"): 1}
    assert per_iteration(found) == once, show(found)


@pytest.mark.parametrize("model", ["lstm", "transformer"])
def test_seq2seq(tmp_path: Path, model: str) -> None:
    found = train(tmp_path, "seq2seq/train.py", *sentences(tmp_path), "--model", model)
    # Sentences longer than any before need more memory, and perhaps another kernel.
    assert not found.recurring(), show(found)


def test_seq2seq_in_two_parts(tmp_path: Path) -> None:
    found = train(tmp_path, "seq2seq/train_model_parallel.py", *sentences(tmp_path))
    times = per_iteration(found)
    # The norm of both ranks' gradients, which is computed in host memory.
    assert {function for _, function in times} == {"Wait", "__call__"}, show(found)
    assert times[0, "__call__"] == times[1, "__call__"] == 1, show(found)


def sentences(folder: Path) -> list[str]:
    """Write something to translate; return the options for it."""
    lines = [" ".join("abcdefgh"[i % 5 : i % 5 + 1 + i % 3]) for i in range(340)]
    for name in ("source", "target"):
        (folder / name).write_text("\n".join([*lines, ""]))
    files = ["--source", str(folder / "source"), "--target", str(folder / "target")]
    return [*files, "--hold-out", "20", "--batchsize", "16", "--unit", "16", "--epoch", "1"]


def test_dcgan(tmp_path: Path) -> None:
    found = train(tmp_path, "dcgan/train.py", "--epoch", "1", "--unit", "4")
    assert not found.in_iterations(), show(found)


def test_cifar(tmp_path: Path) -> None:
    options = ["--examples", "400", "--epoch", "1", "--unit", "4"]
    found = train(tmp_path, "cifar/train.py", *options)
    assert not found.in_iterations(), show(found)


# With CUDA graphs

#: Iterations until graphs are launched: one makes the ranks equal, three are ordinary steps, and
#: two compare a graph with an ordinary step.
UNTIL_GRAPHS = 6


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("mnist/train.py", ["--epoch", "1"]),
        ("cifar/train.py", ["--examples", "800", "--epoch", "1", "--unit", "4"]),
        ("imagenet/train.py", ["--test", "--loaderjob", "0"]),
        ("imagenet/train.py", ["--test", "--loaderjob", "0", "--mixed16", "--clip", "1"]),
        ("imagenet/train.py", ["--test", "--loaderjob", "0", "--mnbn"]),
    ],
)
def test_steps_are_graphs(tmp_path: Path, script: str, options: list[str], ranks: int) -> None:
    found = train(tmp_path, script, "--graphs", *options, ranks=ranks)
    # A capture may get memory, but not wait.
    assert {each.call for each in found.in_captures()} <= set(waits.GROWING), show(found)
    # The first step makes the float32 copies of parameters, which graphs must find.
    until = UNTIL_GRAPHS + ("--mixed16" in options)
    # The first launch gives the memory of eager steps back; the next takes some for its results.
    late = [each for each in found.in_iterations() if each.iteration >= until + 2]
    assert not late, show(found)
    # Those that compare launch a graph, too.
    expected = {rank: n - until + 2 for rank, n in found.iterations.items()}
    assert {rank: counts.replays for rank, counts in found.counts.items()} == expected


def test_one_process_needs_no_chainermn_for_graphs(tmp_path: Path) -> None:
    found = train(tmp_path, "mnist/train_single.py", "--graphs", "--epoch", "1", ranks=1)
    # Here the first iteration makes the optimizer's states, which graphs must find.
    assert found.counts[0].replays == found.iterations[0] - UNTIL_GRAPHS + 2, show(found)
    assert not [each for each in found.in_iterations() if each.iteration >= UNTIL_GRAPHS + 2]


# Each way to exchange gradients

EXCHANGE = """
import sys
import chainer, numpy as np
from chainer.training import StandardUpdater, Trainer
import chainermn

comm = chainermn.create_communicator(**eval(sys.argv[1]))
device = chainer.get_device(f"@cupy:{comm.intra_rank}")
device.use()
model = chainer.links.Classifier(chainer.Sequential(*map(chainer.links.Linear, [9, 99], [99, 2])))
model.to_device(device)
sgd = chainer.optimizers.MomentumSGD()
optimizer = chainermn.create_multi_node_optimizer(sgd, comm, **eval(sys.argv[2])).setup(model)
data = [(np.ones(9, "f"), np.int32(1))] * 40  # replicas are compared after an epoch
updater = StandardUpdater(chainer.iterators.SerialIterator(data, 2), optimizer, device=device)
Trainer(updater, (12, "iteration"), out=sys.argv[3]).run()
"""


@pytest.mark.parametrize(
    ("communicator", "options"),
    [
        ({"communicator_name": "pure_nccl"}, {}),
        ({"communicator_name": "pure_nccl", "allreduce_grad_dtype": "bfloat16"}, {}),
        ({"communicator_name": "pure_nccl"}, {"double_buffering": True}),
        ({"communicator_name": "pure_nccl"}, {"overlap": True}),
        ({"communicator_name": "pure_nccl"}, {"accumulate": 2}),
        ({"communicator_name": "hierarchical"}, {}),
        ({"communicator_name": "two_dimensional"}, {}),
        ({"communicator_name": "single_node"}, {}),
    ],
)
def test_no_wait_for_gradients(
    tmp_path: Path, communicator: dict[str, object], options: dict[str, object]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(EXCHANGE)
    arguments = [repr(communicator), repr(options), str(tmp_path / "out")]
    found = run(tmp_path, script, *arguments)
    assert found.iterations == {0: 12, 1: 12}
    assert not found.recurring(), show(found)
