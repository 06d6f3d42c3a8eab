"""The repaired kernels compile for an H100 with NVRTC; without the repairs, they do not.

Needs CuPy 14, NVRTC and the CUDA headers, but no GPU: nothing is run.
"""

import json
import re
import warnings
from pathlib import Path

import pytest

REPAIRS = "parallel-updater-float16,negative-sampling-atomic-add,hierarchical-softmax-atomic-add"
POINTERS = "raw1 unsigned long long ptrs, raw1 signed char dtypes, raw1 int info"
ARGUMENTS = {
    "memcpy_gather": f"{POINTERS}, raw1 float dst",
    "memcpy_scatter": f"{POINTERS}, raw1 float array",
    "negative_sampling": "T g, raw2 T x, int k, bool mask, int c, int m, raw2 T gW",
    "hierarchical_softmax": "T wxy, raw2 T x, raw2 T w, raw1 int ts, raw1 int paths, "
    "raw1 T codes, raw1 int begins, raw1 T gloss, int c, int max_length, raw2 T gx, raw2 T gw",
}


@pytest.fixture(scope="module")
def compile_kernel():
    with warnings.catch_warnings():
        # Without a GPU, CuPy advises installing NCCL.
        warnings.simplefilter("ignore")
        cupy = pytest.importorskip("cupy", reason="needs CuPy", exc_type=ImportError)
        from cupy.cuda import compiler, get_cuda_path

    if int(cupy.__version__.split(".")[0]) < 14:
        pytest.skip("needs CuPy 14: the faults begin there")
    if get_cuda_path() is None:
        pytest.skip("needs the headers of CUDA: pip install 'cupy-cuda13x[ctk]'")
    headers = Path(cupy.__file__).parent / "_core" / "include"
    folders = [headers, *headers.glob("cupy/_cccl/*"), Path(get_cuda_path()) / "include"]
    options = ("-std=c++17", "-arch=sm_90", *(f"-I{folder}" for folder in folders))

    def compile_(source):
        compiler._NVRTCProgram(source).compile(options)

    compile_.error = compiler.CompileException
    return compile_


def cuda_function(name, kernel):
    """Return the CUDA function that CuPy would make from an elementwise kernel."""
    arguments = []
    for argument in ARGUMENTS[name].split(", "):
        ndim, type_, variable = re.fullmatch(r"(?:raw(.) )?(.+) (\w+)", argument).groups()
        if ndim:
            type_ = f"CArray<{type_}, {ndim}, true, true>"
        arguments.append(f"{type_} {variable}")
    if "T " in ARGUMENTS[name]:
        kernel["preamble"] += "typedef float16 T;\n"
    return (
        "#include <cupy/carray.cuh>\n#include <cupy/atomics.cuh>\n"
        f"{kernel['preamble']}"
        f'extern "C" __global__ void kernel({", ".join(arguments)}, int n) {{\n'
        f"{kernel['loop_prep']};\nfor (int i = 0; i < n; ++i) {{ {kernel['text']} }}\n}}\n"
    )


@pytest.mark.parametrize("name", ARGUMENTS)
def test_only_the_repaired_kernel_compiles(name, compile_kernel, python, fake_cupy):
    def dump(**environment):
        code = (Path(__file__).parent / "dump_kernels.py").read_text()
        return json.loads(python(code, PYTHONPATH=fake_cupy, **environment))[name]

    compile_kernel(cuda_function(name, dump()))
    with pytest.raises(compile_kernel.error):
        compile_kernel(cuda_function(name, dump(CHAINER_COMPAT_SKIP=REPAIRS)))
