"""Find and load oneDNN's shared library, and declare the functions used."""

import contextlib
import ctypes
import functools
import platform
import sys
import weakref
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char, c_float, c_int, c_int64, c_size_t, c_uint, c_void_p
from importlib import metadata
from pathlib import Path

from chainer_fast.onednn import openmp, signals

#: Distribution that contains the library: the extra `onednn`.
DISTRIBUTION = "onednn-cpu-gomp"
_FILE = "libdnnl.so.3"

Dims = c_int64 * 12
_REASONS = {
    1: "out of memory",
    2: "invalid arguments",
    3: "not implemented",
    5: "a failure while running",
}


class OneDNNError(RuntimeError):
    """Raised if a function of oneDNN fails."""


class Handle:
    """An object of oneDNN, destroyed when Python no longer needs it.

    Parameters
    ----------
    create, destroy : str
        Names of the functions that create and destroy it.
    arguments
        Arguments of ``create``, after the place for the handle.
    """

    def __init__(self, create: str, destroy: str, *arguments: object) -> None:
        functions = load()
        # ctypes passes this attribute to functions that take a handle.
        self._as_parameter_ = self.value = c_void_p()
        getattr(functions, create)(byref(self.value), *arguments)
        end = weakref.finalize(self, getattr(functions, destroy), self.value)
        end.atexit = False


class Argument(ctypes.Structure):
    """An operand of a primitive: a number ``DNNL_ARG_*`` and a memory object."""

    _fields_ = (("number", c_int), ("memory", c_void_p))


def is_installed() -> bool:
    """Return whether the distribution that contains oneDNN is installed."""
    return any(metadata.distributions(name=DISTRIBUTION))


@functools.cache
def load() -> ctypes.CDLL:
    """Load oneDNN, once.

    Raises
    ------
    ImportError
        If the library is not installed or cannot be loaded. The message says why and what to do.
    """
    if platform.machine() not in ("x86_64", "AMD64") or sys.platform != "linux":
        raise ImportError(
            f"oneDNN is only used on Linux with x86-64 processors; this is {sys.platform} on "
            f"{platform.machine()}"
        )
    if not is_installed():
        raise ImportError(
            f"oneDNN is not installed: `pip install {DISTRIBUTION} {openmp.DISTRIBUTION}`"
        )
    path = _find(DISTRIBUTION, _FILE)
    threads = _find(openmp.DISTRIBUTION, openmp.FILE)
    try:
        openmp.load(threads.parent)
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(f"oneDNN is installed, but could not be loaded: {error}") from error
    _declare(library)
    return library


def why_not() -> str:
    """Return why oneDNN cannot compute; empty if it can."""
    try:
        load()
    except ImportError as error:
        return str(error)
    return ""


def version() -> str:
    """Return the version of oneDNN, such as ``3.2.0``. Load it first."""

    class Version(ctypes.Structure):
        _fields_ = (("major", c_int), ("minor", c_int), ("patch", c_int))

    query = load().dnnl_version
    query.restype = POINTER(Version)
    found = query().contents
    return f"{found.major}.{found.minor}.{found.patch}"


def _find(distribution: str, name: str) -> Path:
    with contextlib.suppress(metadata.PackageNotFoundError):
        for file in metadata.files(distribution) or ():
            if file.name == name:
                return Path(str(file.locate())).resolve()
    raise ImportError(
        f"oneDNN is installed, but without {name}: `pip install --force-reinstall {distribution}`"
    )


def _check(status: int, function: object, arguments: Sequence[object]) -> None:
    if status != 0:
        name = getattr(function, "__name__", "oneDNN")
        raise OneDNNError(f"{name} failed: {_REASONS.get(status, f'status {status}')}")


def _declare(library: ctypes.CDLL) -> None:
    """Declare the functions, and check the status that most of them return."""
    out, handle = POINTER(c_void_p), c_void_p
    window = [Dims, Dims, Dims, Dims]  # strides, dilations, padding before and behind
    pooling_window = [Dims, *window]  # the kernel after the strides
    status_functions = {
        "dnnl_engine_create": [out, c_int, c_size_t],
        "dnnl_engine_destroy": [handle],
        "dnnl_stream_create": [out, handle, c_uint],
        "dnnl_stream_destroy": [handle],
        "dnnl_memory_desc_create_with_strides": [out, c_int, Dims, c_int, Dims],
        "dnnl_memory_desc_create_with_tag": [out, c_int, Dims, c_int, c_int],
        "dnnl_memory_desc_clone": [out, handle],
        "dnnl_memory_desc_destroy": [handle],
        "dnnl_memory_desc_query": [handle, c_int, c_void_p],
        "dnnl_memory_create": [out, handle, handle, c_void_p],
        "dnnl_memory_set_data_handle": [handle, c_void_p],
        "dnnl_memory_destroy": [handle],
        "dnnl_primitive_attr_create": [out],
        "dnnl_primitive_attr_destroy": [handle],
        "dnnl_primitive_attr_set_scratchpad_mode": [handle, c_int],
        "dnnl_primitive_desc_destroy": [handle],
        "dnnl_primitive_create": [out, handle],
        "dnnl_primitive_destroy": [handle],
        "dnnl_primitive_execute": [handle, handle, c_int, POINTER(Argument)],
        "dnnl_reorder_primitive_desc_create": [out, *[handle] * 5],
        "dnnl_convolution_forward_primitive_desc_create": [
            *(out, handle, c_int, c_int),
            *([handle] * 4),
            *window,
            handle,
        ],
        "dnnl_convolution_backward_data_primitive_desc_create": [
            *(out, handle, c_int),
            *([handle] * 3),
            *window,
            *(handle, handle),
        ],
        "dnnl_convolution_backward_weights_primitive_desc_create": [
            *(out, handle, c_int),
            *([handle] * 4),
            *window,
            *(handle, handle),
        ],
        "dnnl_pooling_forward_primitive_desc_create": [
            *(out, handle, c_int, c_int),
            *(handle, handle),
            *pooling_window,
            handle,
        ],
        "dnnl_pooling_backward_primitive_desc_create": [
            *(out, handle, c_int),
            *(handle, handle),
            *pooling_window,
            *(handle, handle),
        ],
        "dnnl_batch_normalization_forward_primitive_desc_create": [
            *(out, handle, c_int),
            *(handle, handle),
            *(c_float, c_uint, handle),
        ],
        "dnnl_batch_normalization_backward_primitive_desc_create": [
            *(out, handle, c_int),
            *([handle] * 3),
            *(c_float, c_uint, handle, handle),
        ],
        "dnnl_eltwise_forward_primitive_desc_create": [
            *(out, handle, c_int, c_int),
            *(handle, handle),
            *(c_float, c_float, handle),
        ],
        "dnnl_eltwise_backward_primitive_desc_create": [
            *(out, handle, c_int),
            *([handle] * 3),
            *(c_float, c_float, handle, handle),
        ],
        "dnnl_lrn_forward_primitive_desc_create": [
            *(out, handle, c_int, c_int),
            *(handle, handle),
            *(c_int64, c_float, c_float, c_float, handle),
        ],
        "dnnl_lrn_backward_primitive_desc_create": [
            *(out, handle, c_int),
            *([handle] * 3),
            *(c_int64, c_float, c_float, c_float, handle, handle),
        ],
        "dnnl_sgemm": [
            *(c_char, c_char, c_int64, c_int64, c_int64, c_float),
            *(handle, c_int64, handle, c_int64, c_float, handle, c_int64),
        ],
        "dnnl_binary_primitive_desc_create": [out, handle, c_int, *([handle] * 4)],
    }
    for name, argtypes in status_functions.items():
        function = getattr(library, name)
        function.argtypes, function.restype, function.errcheck = argtypes, c_int, _check
    for name in ("dnnl_primitive_execute", "dnnl_sgemm"):
        setattr(library, name, signals.held_back(getattr(library, name)))
    library.dnnl_primitive_desc_query_md.argtypes = [handle, c_int, c_int]
    library.dnnl_primitive_desc_query_md.restype = c_void_p
    library.dnnl_memory_desc_get_size.argtypes = [handle]
    library.dnnl_memory_desc_get_size.restype = c_size_t
