"""The null GPU itself: what it does, what it cannot do, and that no wait escapes it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ci.null_gpu import build, waits

if reason := build.why_not():
    pytest.skip(reason, allow_module_level=True)

PROGRAM = Path(__file__).resolve().parent
LIMIT = 300

TRAINING = """
import chainer, numpy as np
from chainer.training import StandardUpdater, Trainer
from ctypes import c_void_p

device = chainer.get_device("@cupy:0")
device.use()
model = chainer.Sequential(chainer.links.Linear(3, 2))
model.to_device(device)
optimizer = chainer.optimizers.SGD().setup(model)

ONES, ZEROS = np.ones(1 << 15, "f"), device.xp.zeros(1 << 15, "f")
HOST = c_void_p(ONES.ctypes.data)

def find_loss(x):
    loss = chainer.functions.sum(model(x))
    {}
    return loss

batches = chainer.iterators.SerialIterator([np.ones(3, "f")] * 4, 2)
updater = StandardUpdater(batches, optimizer, device=device, loss_func=find_loss)
trainer = Trainer(updater, (8, "iteration"), out={!r})
trainer.run()
"""


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a function that runs a script and returns exit code, standard output and error."""

    def run(text: str, *options: str) -> tuple[int, str, str]:
        script = tmp_path / "script.py"
        script.write_text(text)
        command = [sys.executable, str(PROGRAM), *options, sys.executable, str(script)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
        return done.returncode, done.stdout, done.stderr

    return run


def test_memory_is_real_and_kernels_compute_nothing(run: Run) -> None:
    code, output, _ = run("""
import cupy, numpy as np
x = np.arange(6, dtype="f").reshape(2, 3)
on_gpu = cupy.asarray(x)
print((on_gpu.get() == x).all(), on_gpu.T.shape, on_gpu.T.copy().get().tolist())
print((on_gpu + 1).get().tolist(), float(on_gpu.sum()), (on_gpu @ on_gpu.T).shape)
""")
    assert code == 0
    assert output.splitlines() == [
        "True (3, 2) [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]",
        "[[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]] 0.0 (2, 2)",
    ]


def test_as_many_devices_as_asked_for(run: Run) -> None:
    text = """
import cupy
print([cupy.cuda.Device(i).pci_bus_id for i in range(cupy.cuda.runtime.getDeviceCount())])
cupy.cuda.Device(3).use()
"""
    code, output, error = run(text, "--devices", "3")
    assert code == 1
    assert output == "['0000:01:00.0', '0000:02:00.0', '0000:03:00.0']\n"
    assert "cudaErrorInvalidDevice" in error


def test_kernels_are_compiled_for_real(run: Run) -> None:
    code, _, error = run("""
import cupy
cupy.RawKernel('extern "C" __global__ void f(float *x) { x[0] = nonsense; }', "f").compile()
""")
    assert code == 1
    assert 'identifier "nonsense" is undefined' in error


def test_function_that_is_not_there_is_named(run: Run) -> None:
    code, _, error = run("import cupy; cupy.cuda.runtime.mallocArray(1, 1, 1)")
    assert code == 1
    assert "null GPU: there is no cudaMallocArray yet" in error


PLANTED = {
    "float(loss.array)": "cudaStreamSynchronize",
    "bool(loss.array > 0)": "cudaStreamSynchronize",
    "loss.array.get()": "cudaMemcpyAsync to pageable memory",
    "ZEROS.data.copy_from_host_async(HOST, 1 << 17)": "cudaMemcpyAsync from pageable memory",
    "device.device.synchronize()": "cudaDeviceSynchronize",
    "chainer.cuda.Stream.null.synchronize()": "cudaStreamSynchronize",
    "x.data.copy_from_host(HOST, 24)": "cudaMemcpy",
    "device.xp.cuda.alloc(1 << 20 << updater.iteration)": "cudaMalloc",
    "device.xp.cuda.Event().synchronize()": "cudaEventSynchronize",
}


def test_every_planted_wait_is_found_with_its_line(run: Run, tmp_path: Path) -> None:
    text = TRAINING.format("\n    ".join(PLANTED), str(tmp_path))
    code, _, error = run(text)
    assert code == 0, error
    found = error[error.index("in iterations, after the first 5:") : error.index("between them:")]
    lines = [line.strip() for line in text.splitlines()]
    for planted, call in PLANTED.items():
        where = f"{tmp_path}/script.py:{1 + lines.index(planted)} find_loss"
        assert f"     3 in 3 iterations: update, {call}, {where}\n" in found


def test_nothing_waits_unless_it_is_planted(run: Run, tmp_path: Path) -> None:
    code, _, error = run(TRAINING.format("pass", str(tmp_path)))
    assert code == 0, error
    kernels = error.split("rank 0: 8 iterations, ")[1].split()[0]
    assert int(kernels) > 8 * 5
    nothing = "     0"
    assert error.splitlines()[-4:] == [
        f"in iterations, after the first {waits.FIRST}:",
        nothing,
        "between them:",
        nothing,
    ]


def test_exit_code(run: Run) -> None:
    assert run("raise SystemExit(7)")[0] == 7
