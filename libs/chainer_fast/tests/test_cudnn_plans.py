"""The real cuDNN accepts our graphs and plans them for an H200, without any GPU.

Needs nvidia-cudnn-frontend, cuDNN and cuBLAS: `pip install './libs/chainer_fast[cudnn13]'`.
Nothing is run: cuDNN chooses and finalizes its engines from the properties of a device.
"""

import ctypes
import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from itertools import chain
from pathlib import Path

import pytest

NEEDED = {
    "nvidia-cudnn-frontend": ("nvidia-cudnn-frontend",),
    "cuDNN": ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
    "cuBLAS": ("nvidia-cublas", "nvidia-cublas-cu12"),
}
# From the CUDA driver, without which cuDNN does not load. Planning only calls this function.
DRIVER = """\
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
"""
REFUSING = """\
cuCtxGetCurrent cuCtxGetLimit cuCtxPopCurrent cuCtxPushCurrent cuDeviceGet cuDeviceGetCount
cuGetErrorName cuGetErrorString cuKernelGetAttribute cuKernelGetFunction cuKernelSetAttribute
cuLaunchCooperativeKernel cuLaunchKernel cuLaunchKernelEx cuLibraryGetKernel cuLibraryLoadData
cuLibraryLoadFromFile cuLibraryUnload cuLinkAddData cuLinkComplete cuLinkCreate cuLinkDestroy
cuModuleGetFunction cuModuleLoadData cuModuleUnload cuOccupancyMaxPotentialClusterSize
cuStreamGetCtx cuTensorMapEncodeIm2col cuTensorMapEncodeTiled
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """Return a library path with a CUDA driver, or a stand-in for one."""
    for what, names in NEEDED.items():
        if not any(map(is_installed, names)):
            pytest.skip(f"needs {what}: pip install './libs/chainer_fast[cudnn13]'")
    given = os.environ.get("LD_LIBRARY_PATH", "")
    try:
        ctypes.CDLL("libcuda.so.1")
        return given
    except OSError:
        pass
    if not shutil.which("cc"):
        pytest.skip("needs an NVIDIA driver, or a C compiler for what stands in for it")
    folder = tmp_path_factory.mktemp("driver")
    source, library = folder / "driver.c", folder / "libcuda.so.1"
    refusals = (f"int {name}(void) {{ return 3; }}\n" for name in REFUSING.split())
    source.write_text(DRIVER + "".join(refusals))
    compile_ = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, source]
    subprocess.run(compile_, check=True)
    return os.pathsep.join(filter(None, (str(folder), given)))


def is_installed(distribution):
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


@pytest.fixture(scope="module")
def found(libraries, execute):
    """cuDNN's answers, from a process of its own, which it ends if it lacks a library."""
    script = Path(__file__).parent / "plan_cudnn.py"
    result = execute(sys.executable, script, LD_LIBRARY_PATH=libraries)
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(result.stdout)


def test_cudnn_infers_the_shapes_that_we_do(found):
    assert len(found["inferred"]) == 13
    assert found["inferred"] == found["convolved"]


def test_there_is_a_plan_for_everything_that_we_call_possible(found):
    assert len(found["plans"]) == 9 * 13 * 3
    errors = [f"{name}: {p['error']}" for name, p in found["plans"].items() if "error" in p]
    assert not errors, "\n".join(errors)
    for plan in found["plans"].values():
        assert plan["possible"]
        assert plan["workspace"] >= 0
        assert plan["shape"] == plan["expected"]
        assert plan["strides"] == plan["dense"]


def test_settings_change_what_is_chosen(found):
    """Without tensor cores, nothing is copied into the order of axes that they need."""
    for computes in "xwy":
        with_them = found["plans"][f"float32 tensor cores, {computes}, 3x3 of ResNet-50"]
        without = found["plans"][f"float32, {computes}, 3x3 of ResNet-50"]
        assert with_them["workspace"] > without["workspace"]


def test_channels_last_convolutions_of_resnet50_need_no_copies(found):
    """In Chainer's order, cuDNN copies images to this one: most need 10 to 600 MiB for that."""
    plans = found["channels last"]
    assert len(plans) == 2 * (2 + 3 * 25)
    for plan in plans.values():
        assert plan["strides"] == plan["dense"]
        assert plan["workspace"] <= 2 * 2**20


def test_what_cudnn_refuses_is_not_called_possible(found):
    """If there is no plan, the error says what was asked for and what to do."""
    error = found["impossible"]["error"]
    assert error.startswith("RuntimeError: cuDNN 9.")
    assert "Convolution(computes='y', x=(2147483648, 1, 1, 1)" in error
    assert "chainer.using_config('use_cudnn', 'never')" in error


def test_cudnn_has_the_functions_that_normalize(found):
    """Their descriptors say what we mean: the dtype, the shape, and the strides."""
    float32, float16 = 0, 2
    images, strides = [2, 3, 4, 5], [60, 20, 5, 1]
    statistics = [float32, 1, 3, 1, 1, 3, 1, 1, 1]
    assert found["described"] == [
        [float16, *images, *strides],
        statistics,
        [float32, *images, *strides],
        statistics,
        [float16, *images, 60, 1, 15, 3],
        statistics,
    ]


def test_cudnn_gets_the_same_from_our_launches_as_from_the_frontend(libraries, execute, tmp_path):
    """The plan, handle, arrays and workspace are the same; a launch needs no ``graph.execute``."""
    if not shutil.which("cc"):
        pytest.skip("needs a C compiler for what notes what cuDNN gets")
    folder = Path(__file__).parent
    noting = tmp_path / "libcudnn.so"  # the name that the frontend tries first
    needed = ["-Wl,--no-as-needed", find_cudnn(), "-ldl"]
    source = folder / "execute_cudnn.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", noting, source, *needed], check=True)
    path = os.pathsep.join(filter(None, (str(tmp_path), str(find_cudnn().parent), libraries)))
    result = execute(sys.executable, folder / "execute_cudnn.py", noting, LD_LIBRARY_PATH=path)
    assert result.returncode == 0, result.stdout + result.stderr
    outcomes = json.loads(result.stdout)
    assert len(outcomes) == 9 * 13 * 3
    for by_frontend, by_launch in outcomes.values():
        assert by_launch == by_frontend
    assert sum(type(by_launch) is list for _, by_launch in outcomes.values()) > 100


def find_cudnn():
    files = (metadata.files(name) or [] for name in NEEDED["cuDNN"] if is_installed(name))
    return next(Path(file.locate()) for file in chain(*files) if file.name == "libcudnn.so.9")
