"""The kernels that gather and scatter gradients: compiled for GPUs, and for this processor."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from chainermn.gradients import batched_copy
from chainermn.gradients.batched_copy import (
    ALIGNMENT,
    DTYPES,
    BatchedCopy,
    piece_length,
    pieces,
)
from chainermn.transport.gpu.device import THREADS
from chainermn.transport.reducer import padded_length

KERNELS = [
    f"{what}_{dtype}_{wire}"
    for what, dtype, wire in itertools.product(["gather", "scatter"], DTYPES, DTYPES)
]


def dtype_of(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def whole_source() -> str:
    """Return the code of all kernels as one source."""
    first, *others = (batched_copy.source(*pair) for pair in itertools.product(DTYPES, DTYPES))
    return first + "".join(other[other.rindex("KERNELS(") :] for other in others)


def test_pieces() -> None:
    table = pieces([0, 1, 3], [5, 0, 7, 25], [0, 64, 64, 128], 10)
    assert table.tolist() == [[0, 0, 5, 0], [3, 0, 10, 128], [3, 10, 10, 138], [3, 20, 5, 148]]
    assert table.dtype == np.int64  # as the kernels read it
    assert pieces([], [], [], 10).shape == pieces([0], [0], [0], 10).shape == (0, 4)
    assert pieces([0], [3 << 32], [1 << 33], 1 << 31)[-1].tolist() == [
        *(0, 5 << 31, 1 << 31),
        (1 << 33) + (5 << 31),
    ]


def test_pieces_keep_all_threads_of_a_block_busy_once() -> None:
    for dtype, wire in itertools.product(map(dtype_of, DTYPES), repeat=2):
        in_one_instruction = 16 // max(dtype.itemsize, wire.itemsize)
        assert piece_length(dtype, wire) == THREADS * 4 * in_one_instruction
        assert piece_length(dtype, wire) % ALIGNMENT == 0


def test_buffer_is_as_long_as_ranks_can_divide() -> None:
    assert [padded_length(n, 3) for n in (0, 1, 3, 7)] == [0, 3, 3, 9]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels, compiled into a library for this processor."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler: neither g++ nor clang++")
    folder = tmp_path_factory.mktemp("compiled")
    calls = "".join(
        f'extern "C" void run_{kernel}(unsigned n_blocks, const void* pieces, void* pointers,'
        "void* buffer, double divisor) {"
        "for (blockIdx.x = 0; blockIdx.x < n_blocks; ++blockIdx.x)"
        "for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x)"
        f"{kernel}((const Piece*)pieces, ({kernel.split('_')[1]}::Stored**)pointers,"
        f"({kernel.split('_')[2]}::Stored*)buffer"
        f"{', divisor' * kernel.startswith('scatter')}); }}\n"
        for kernel in KERNELS
    )
    header = Path(__file__).with_name("host_cuda.h").read_text()
    code = folder / "kernels.cpp"
    code.write_text(header + whole_source() + calls)
    library = folder / "kernels.so"
    options = ["-std=c++17", "-O1", "-fPIC", "-shared", "-Wno-unknown-pragmas"]
    subprocess.run([compiler, *options, code, "-o", library], check=True)
    return ctypes.CDLL(str(library))


def on_this_processor(compiled: ctypes.CDLL) -> Callable[..., None]:
    def run(source: str, kernel: str, n_blocks: int, arguments: Any) -> None:
        table, pointers, buffer = arguments[:3]
        assert f"KERNELS({kernel.split('_', 1)[1].replace('_', ', ')})" in source
        getattr(compiled, f"run_{kernel}")(
            *(ctypes.c_uint(n_blocks), ctypes.c_void_p(table.ctypes.data)),
            *(ctypes.c_void_p(pointers.ctypes.data), ctypes.c_void_p(int(buffer))),
            ctypes.c_double(arguments[3] if len(arguments) > 3 else 1),
        )

    return run


def numbers(n: int, dtype: np.dtype) -> np.ndarray:
    values = np.random.default_rng(n).normal(size=n) * 10.0 ** (np.arange(n) % 11 - 8)
    special = [np.inf, -np.inf, np.nan, 0.0, -0.0, 65519, 65520, 6e-8, 2.9e-8, 1e-40]
    values[: min(n, 10)] = special[: min(n, 10)]
    with np.errstate(over="ignore"):
        return values.astype(dtype)


def assert_same(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(np.asarray(actual, "f8"), expected.astype("f8"))


@pytest.mark.parametrize("wire", DTYPES)
@pytest.mark.parametrize("offset", [0, 1])
def test_kernels_on_this_processor(
    stand_in: Any, compiled: ctypes.CDLL, wire: str, offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Start each array ``offset`` elements past an aligned address."""
    monkeypatch.setattr(stand_in, "run", on_this_processor(compiled))
    wire_dtype = dtype_of(wire)
    dtypes = [dtype_of(name) for name in (*DTYPES, *DTYPES)]
    block = piece_length(wire_dtype, wire_dtype)
    sizes = [1, 0, block, 2 * block + 3, 300, 7, block - 1, 2]
    given = [numbers(n, dtype) for n, dtype in zip(sizes, dtypes, strict=True)]
    arrays = [
        aligned(stand_in, n + offset, t)[offset:] for n, t in zip(sizes, dtypes, strict=True)
    ]
    for array, values in zip(arrays, given, strict=True):
        array[:] = values
    copy = BatchedCopy(stand_in, sizes, dtypes, wire_dtype)
    assert copy.length == sum(n + -n % ALIGNMENT for n in sizes)
    buffer = aligned(stand_in, copy.length + 2, wire_dtype)
    copy.gather(arrays, buffer)
    with np.errstate(over="ignore"):
        expected = [array.astype(wire_dtype) for array in given]
    padded = [np.pad(part, (0, -part.size % ALIGNMENT)) for part in expected]
    assert_same(buffer[:-2], np.concatenate(padded))
    assert (buffer[-2:].view(np.uint8) == 0xAB).all()  # nothing is written past the end

    before = np.array(buffer)
    for array in arrays:
        array[...] = 0
    copy.scatter(buffer, arrays, 3)
    assert before.tobytes() == buffer.tobytes()
    for array, dtype, part in zip(arrays, dtypes, expected, strict=True):
        wide = np.float64 if "float64" in (wire, dtype.name) else np.float32
        with np.errstate(over="ignore"):
            quotient = (part.astype(wide) / wide(3)).astype(dtype)
        assert_same(array, quotient)
        assert (array.base.view(np.uint8)[: offset * dtype.itemsize] == 0xAB).all()


def aligned(stand_in: Any, n: int, dtype: np.dtype) -> np.ndarray:
    """Return an array that is aligned like one in GPU memory."""
    memory = stand_in.empty(n * dtype.itemsize + 512, np.dtype(np.uint8))
    start = -memory.ctypes.data % 512
    return np.frombuffer(memory, dtype, n, start).view(type(memory))


def test_tables_are_uploaded_once(stand_in: Any) -> None:
    arrays = [stand_in.to_gpu(np.ones(3, "f")) for _ in range(2)]
    copy = BatchedCopy(stand_in, [3, 3], [np.dtype("f4")] * 2, np.dtype("f4"))
    buffer = stand_in.empty(copy.length, np.dtype("f4"))
    for _ in range(3):
        copy.gather(arrays, buffer)
    copy.scatter(buffer, arrays, 2)
    gather, scatter = "gather_float32_float32", "scatter_float32_float32"
    assert stand_in.log == ["upload", "upload", *[gather] * 3, scatter]
    copy.gather(arrays[::-1], buffer)  # elsewhere in memory
    assert stand_in.log[-2:] == ["upload", gather]
    assert (arrays[0] == 0.5).all()


def test_one_kernel_for_each_dtype(stand_in: Any) -> None:
    sizes, dtypes = [3, 4, 5, 0], [np.dtype(name) for name in ("f4", "f2", "f4", "f8")]
    arrays = [stand_in.to_gpu(np.full(n, n, t)) for n, t in zip(sizes, dtypes, strict=True)]
    copy = BatchedCopy(stand_in, sizes, dtypes, np.dtype("f2"))
    buffer = stand_in.empty(copy.length, np.dtype("f2"))
    copy.gather(arrays, buffer)
    kernels = ["gather_float32_float16", "gather_float16_float16"]
    assert [entry for entry in stand_in.log if entry != "upload"] == kernels
    assert buffer.reshape(3, ALIGNMENT).sum(axis=1).tolist() == [9, 16, 25]


def load_nvrtc() -> ctypes.CDLL | None:
    """Load NVRTC from its Python package, a CUDA toolkit, or wherever the linker looks."""
    folders = [Path(entry) for entry in __import__("nvidia").__path__] if has_nvidia() else []
    found = [path for folder in folders for path in sorted(folder.glob("*/lib/libnvrtc.so.*"))]
    for name in [*map(str, found), *(f"libnvrtc.so.{major}" for major in (13, 12)), "libnvrtc.so"]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def has_nvidia() -> bool:
    import importlib.util

    return importlib.util.find_spec("nvidia") is not None


@pytest.fixture(scope="module")
def nvrtc() -> ctypes.CDLL:
    library = load_nvrtc()
    if library is None:
        pytest.skip("no NVRTC (libnvrtc.so): pip install nvidia-cuda-nvrtc")
    return library


def compile_for(nvrtc: ctypes.CDLL, source: str, architecture: int) -> tuple[str, bytes]:
    """Return NVRTC's log and its machine code, which is empty after an error."""
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None)
    options = [b"-std=c++17", b"-Werror=all-warnings", f"-arch=sm_{architecture}".encode()]
    code = nvrtc.nvrtcCompileProgram(
        program, len(options), (ctypes.c_char_p * len(options))(*options)
    )
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    cubin = b""
    if code == 0:
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, buffer)
        cubin = buffer.raw
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return log.value.decode(), cubin


def test_kernels_compile_for_gpus_old_and_new(nvrtc: ctypes.CDLL) -> None:
    count = ctypes.c_int()
    nvrtc.nvrtcGetNumSupportedArchs(ctypes.byref(count))
    architectures = (ctypes.c_int * count.value)()
    nvrtc.nvrtcGetSupportedArchs(architectures)
    assert 90 in architectures  # H100, H200
    for architecture in (min(architectures), max(architectures)):
        log, cubin = compile_for(nvrtc, whole_source(), architecture)
        assert cubin, log
        assert all(kernel.encode() in cubin for kernel in KERNELS)


def test_nvrtc_finds_errors(nvrtc: ctypes.CDLL) -> None:
    log, cubin = compile_for(nvrtc, whole_source().replace("cvt.f32.f16", "cvt.f33.f16"), 90)
    assert not cubin
    assert "cvt.f33.f16" in log or "ptxas" in log
