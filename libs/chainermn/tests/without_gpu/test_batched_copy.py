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
from chainermn.gradients.batched_copy import KINDS, BatchedCopy, layout
from chainermn.transport.reducer import padded_length

BLOCK = batched_copy.BLOCK_LENGTH


def dtype_of(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def test_layout() -> None:
    sizes = [5, 0, BLOCK, 2 * BLOCK + 1]
    tables = layout(sizes, [np.dtype("f4")] * 3 + [np.dtype("f2")])
    assert [table.tolist() for table in tables] == [
        [2, 2, 2, 0],
        sizes,
        [0, 5, 5, BLOCK + 5],
        [0, 2, 3, 3, 3],
        [0, 0, 0, BLOCK, 2 * BLOCK],
    ]
    types = [np.int32, np.int64, np.int64, np.int32, np.int64]
    assert [table.dtype for table in tables] == types  # as the kernels read them
    assert [len(table) for table in layout([], [])] == [0] * 5


def test_buffer_is_as_long_as_ranks_can_divide() -> None:
    assert [padded_length(n, 3) for n in (0, 1, 3, 7)] == [0, 3, 3, 9]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels as functions of a library for this processor."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler: neither g++ nor clang++")
    folder = tmp_path_factory.mktemp("compiled")
    calls = "".join(
        f'extern "C" void run_{what}_{name}(unsigned n_blocks, ARGUMENTS, double divisor) {{'
        "for (blockIdx.x = 0; blockIdx.x < n_blocks; ++blockIdx.x)"
        "for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x)"
        f"{what}_{name}(pointers, kinds, sizes, offsets, block_arrays, block_starts,"
        f"block_length, buffer{', divisor' * (what == 'scatter')}); }}\n"
        for what, name in itertools.product(["gather", "scatter"], KINDS)
    )
    header = Path(__file__).with_name("host_cuda.h").read_text()
    code = folder / "kernels.cpp"
    code.write_text(header + batched_copy.source() + calls)
    library = folder / "kernels.so"
    options = ["-std=c++17", "-O1", "-fPIC", "-shared", "-Wno-unknown-pragmas"]
    subprocess.run([compiler, *options, code, "-o", library], check=True)
    return ctypes.CDLL(str(library))


def on_this_processor(compiled: ctypes.CDLL) -> Callable[..., None]:
    def run(source: str, kernel: str, n_blocks: int, arguments: Any) -> None:
        *tables, length, buffer = arguments[:8]
        pointers = [ctypes.c_void_p(table.ctypes.data) for table in tables]
        divisor = ctypes.c_double(arguments[8] if len(arguments) > 8 else 1)
        getattr(compiled, f"run_{kernel}")(
            *(ctypes.c_uint(n_blocks), *pointers, ctypes.c_longlong(int(length))),
            *(ctypes.c_ulonglong(int(buffer)), divisor),
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


@pytest.mark.parametrize("wire", KINDS)
def test_kernels_on_this_processor(
    stand_in: Any, compiled: ctypes.CDLL, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stand_in, "run", on_this_processor(compiled))
    wire_dtype = dtype_of(wire)
    dtypes = [dtype_of(name) for name in (*KINDS, *KINDS)]
    sizes = [1, 0, BLOCK, 2 * BLOCK + 3, 300, 7, BLOCK - 1, 2]
    given = [numbers(n, dtype) for n, dtype in zip(sizes, dtypes, strict=True)]
    arrays = [stand_in.to_gpu(array) for array in given]
    copy = BatchedCopy(stand_in, sizes, dtypes, wire_dtype)
    buffer = stand_in.empty(sum(sizes) + 2, wire_dtype)
    copy.gather(arrays, buffer)
    with np.errstate(over="ignore"):
        expected = np.concatenate([array.astype(wire_dtype) for array in given])
    assert_same(buffer[:-2], expected)
    assert (buffer[-2:].view(np.uint8) == 0xAB).all()  # nothing is written behind the end

    for array in arrays:
        array[...] = 0
    copy.scatter(buffer, arrays, 3)
    offset = 0
    for array, dtype in zip(arrays, dtypes, strict=True):
        part = np.asarray(buffer[offset : offset + array.size])
        offset += array.size
        wide = np.float64 if "float64" in (wire, dtype.name) else np.float32
        with np.errstate(over="ignore"):
            quotient = (part.astype(wide) / wide(3)).astype(dtype)
        assert_same(array, quotient)


def test_tables_are_uploaded_once(stand_in: Any) -> None:
    arrays = [stand_in.to_gpu(np.ones(3, "f")) for _ in range(2)]
    copy = BatchedCopy(stand_in, [3, 3], [np.dtype("f4")] * 2, np.dtype("f4"))
    buffer = stand_in.empty(6, np.dtype("f4"))
    for _ in range(3):
        copy.gather(arrays, buffer)
    copy.scatter(buffer, arrays, 2)
    tables = ["upload"] * 5
    assert stand_in.log == [*tables, "upload", *["gather_float32"] * 3, "scatter_float32"]
    copy.gather(arrays[::-1], buffer)  # elsewhere in memory
    assert stand_in.log[-2:] == ["upload", "gather_float32"]
    assert (arrays[0] == 0.5).all()


def load_nvrtc() -> ctypes.CDLL | None:
    """Load NVRTC: of the package index, of a CUDA toolkit, or from where the linker looks."""
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
    kernels = {f"{what}_{name}" for what in ("gather", "scatter") for name in KINDS}
    for architecture in (min(architectures), 90, max(architectures)):
        log, cubin = compile_for(nvrtc, batched_copy.source(), architecture)
        assert cubin, log
        assert all(kernel.encode() in cubin for kernel in kernels)


def test_nvrtc_finds_errors(nvrtc: ctypes.CDLL) -> None:
    log, cubin = compile_for(
        nvrtc, batched_copy.source().replace("cvt.f32.f16", "cvt.f33.f16"), 90
    )
    assert not cubin
    assert "cvt.f33.f16" in log or "ptxas" in log
