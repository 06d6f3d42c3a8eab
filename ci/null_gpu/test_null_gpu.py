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


CAPTURE = """
import ctypes, cupy, numpy as np
from cupy.cuda import Event, MemoryPool, Stream, runtime, using_allocator

gpu = ctypes.CDLL("libcuda.so.1")
ONES = np.ones(6, "f")
HOST = ctypes.c_void_p(ONES.ctypes.data)
UPLOAD, DOWNLOAD, ON_GPU = 1, 2, 3
x, y = cupy.zeros(6, "f"), cupy.zeros(6, "f")
x * 2, cupy.random.rand(3), x.reshape(2, 3) @ x.reshape(3, 2)

def stream():
    return Stream(non_blocking=True)

def record(*streams):
    event = Event(disable_timing=True)
    event.record(*streams)
    return event

def show(graph):
    lines = [line for line in graph.debug_dot_str().splitlines() if "label" in line]
    return [line.split('"')[1] for line in lines]
"""


@pytest.fixture
def run_with_graphs(run: Run) -> Run:
    """Return a function that runs a script that begins with `CAPTURE`."""
    return lambda text: run(CAPTURE + text)


def test_graph_repeats_what_was_captured(run_with_graphs: Run) -> None:
    code, output, error = run_with_graphs("""
from cupy.cuda import nccl
first, second, pool = stream(), stream(), MemoryPool()
talk = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
blas = ctypes.CDLL("libcublas.so.13")
before = gpu.null_gpu_launches()
with first, using_allocator(pool.malloc):
    first.begin_capture()
    double = x * 2
    second.wait_event(record())
    y.data.copy_from_device_async(x.data, 12, second)
    first.wait_event(record(second))
    talk.allReduce(x.data.ptr, x.data.ptr, 6, nccl.NCCL_FLOAT, nccl.NCCL_SUM, first.ptr)
    blas.cublasSetStream_v2(None, ctypes.c_void_p(first.ptr))
    blas.cublasGemmEx()
    new = cupy.zeros(4, "f")
    graph = first.end_capture()
print(*show(graph), sep="\\n")
x.data.copy_from_host(HOST, 24)
print(y.tolist(), gpu.null_gpu_launches() - before, gpu.null_gpu_captures())
new.data.copy_from_host(HOST, 16)
graph.upload(first)
for _ in range(2):
    graph.launch(first)
print(y.tolist(), new.tolist(), gpu.null_gpu_launches() - before)
print(gpu.null_gpu_replays(), gpu.null_gpu_replayed())
""")
    assert code == 0, error
    assert output.splitlines() == [
        "stream 0: kernel cupy_multiply__float32_float_float32",
        "stream 1: copy 12",
        "stream 0: kernel ncclAllReduce",
        "stream 0: kernel cublasGemmEx",
        "stream 0: fill 16",
        "[0.0, 0.0, 0.0, 0.0, 0.0, 0.0] 0 1",
        "[1.0, 1.0, 1.0, 0.0, 0.0, 0.0] [0.0, 0.0, 0.0, 0.0] 6",
        "2 6",
    ]


# What the line raises in a capture, and what the end of the capture raises: errors of CUDA, or of
# CuPy, which refuses before it calls CUDA.
IN_CAPTURE = {
    "first.synchronize()": "StreamCaptureUnsupported, StreamCaptureInvalidated",
    "first.done": "None, StreamCaptureInvalidated",
    "cupy.cuda.Device().synchronize()": "StreamCaptureUnsupported, StreamCaptureInvalidated",
    "record().done": "None, StreamCaptureInvalidated",
    "record().synchronize()": "CapturedEvent, StreamCaptureInvalidated",
    "x.data.copy_from_host_async(HOST, 24)": "RuntimeError, None",
    "runtime.memcpyAsync(x.data.ptr, HOST.value, 24, UPLOAD, first.ptr)": (
        "StreamCaptureUnsupported, StreamCaptureInvalidated"
    ),
    "runtime.memcpyAsync(HOST.value, x.data.ptr, 24, DOWNLOAD, first.ptr)": (
        "StreamCaptureUnsupported, StreamCaptureInvalidated"
    ),
    "runtime.memcpy(x.data.ptr, y.data.ptr, 4, ON_GPU)": (
        "StreamCaptureUnsupported, StreamCaptureInvalidated"
    ),
    "runtime.free(old)": "StreamCaptureUnsupported, StreamCaptureInvalidated",
    "first.begin_capture()": "IllegalState, None",
    "first.wait_event(outside)": "StreamCaptureIsolation, StreamCaptureInvalidated",
    "second.wait_event(record())": "None, StreamCaptureUnjoined",
    "second.wait_event(record()); first.wait_event(record(second))": "None, None",
    "second.wait_event(record()); second.end_capture()": (
        "StreamCaptureUnmatched, StreamCaptureInvalidated"
    ),
    "second.begin_capture(); second.wait_event(record())": (
        "StreamCaptureMerge, StreamCaptureInvalidated"
    ),
    "Stream.null.wait_event(record())": "StreamCaptureUnsupported, StreamCaptureInvalidated",
    "blocking.begin_capture(); Stream.null.record()": "StreamCaptureImplicit, None",
    "Stream.null.synchronize(); cupy.cuda.alloc(1 << 22)": "None, None",
    "x.reshape(2, 3) @ x.reshape(3, 2)": "NotImplementedError, None",
    "cupy.random.rand(3)": "NotImplementedError, None",
    "float(x[0])": "RuntimeError, None",
    "cupy.asarray(np.ones(3))": "RuntimeError, None",
}


def test_errors_in_a_capture(run_with_graphs: Run) -> None:
    code, output, error = run_with_graphs(f"""
def name(call):
    try:
        call()
    except runtime.CUDARuntimeError as error:
        return str(error).split(":")[0].removeprefix("cudaError")
    except Exception as error:
        return type(error).__name__

for line in {list(IN_CAPTURE)}:
    first, second, blocking = stream(), stream(), Stream()
    old, outside = runtime.malloc(8), record(Stream.null)
    with first:
        first.begin_capture()
        print(line, name(lambda: exec(line)), name(first.end_capture), sep=", ")
    for other in second, blocking:
        name(other.end_capture)
""")
    assert code == 0, error
    assert output.splitlines() == [f"{line}, {errors}" for line, errors in IN_CAPTURE.items()]


def test_graph_cannot_use_what_is_gone(run_with_graphs: Run) -> None:
    code, output, error = run_with_graphs("""
code = 'extern "C" __global__ void f(float *x) { x[0] = 1; }'
on_gpu, pinned = runtime.malloc(24), runtime.hostAlloc(24, 0)
module = cupy.RawModule(code=code)
f = module.get_function("f")
s = stream()
works = {
    "pinned": lambda: runtime.memcpyAsync(x.data.ptr, pinned, 24, UPLOAD, s.ptr),
    "on_gpu": lambda: runtime.memcpyAsync(x.data.ptr, on_gpu, 24, ON_GPU, s.ptr),
    "kernel": lambda: f((1,), (1,), (x,)),
}
graphs = {}
with s:
    for name, work in works.items():
        s.begin_capture()
        work()
        graphs[name] = s.end_capture()
        graphs[name].launch(s)
runtime.freeHost(pinned)
runtime.free(on_gpu)
del works, work, f, module
cupy.clear_memo()
for graph in graphs.values():
    try:
        graph.launch(s)
    except runtime.CUDARuntimeError as error:
        print(error)
""")
    assert code == 0, error
    assert output.splitlines() == [
        "cudaErrorIllegalAddress: memory that the graph copies has been freed",
        "cudaErrorIllegalAddress: memory that the graph copies has been freed",
        "cudaErrorIllegalAddress: a kernel of the graph has been unloaded",
    ]


ADDITION = """
s = stream()
with s, using_allocator(MemoryPool().malloc):
    s.begin_capture()
    new = x + y
    graph = s.end_capture()
graph.launch(s)
graph.launch(s)
"""


def test_what_is_loaded_in_a_capture_is_noted(tmp_path: Path) -> None:
    script, notes = tmp_path / "script.py", tmp_path / "notes"
    notes.mkdir()
    script.write_text(CAPTURE + ADDITION)
    environment = build.environment(1, notes)
    subprocess.run([sys.executable, str(script)], env=environment, check=True, timeout=LIMIT)
    found = waits.read(notes)
    assert [each.call for each in found.in_captures()] == ["cudaMalloc", "cuModuleLoadData"]
    counts = found.counts[0]
    assert (counts.captures, counts.replays, counts.replayed) == (1, 2, 2)


def test_exit_code(run: Run) -> None:
    assert run("raise SystemExit(7)")[0] == 7
