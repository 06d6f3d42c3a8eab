"""Whether this process could use a GPU."""

from __future__ import annotations


def why_no_gpu() -> str | None:
    """Return why CUDA cannot be used here, or None if it can."""
    try:
        import cupy
    except ImportError:
        return "CuPy is not installed"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"CUDA does not answer ({error})"
    return None if count else "there is no CUDA device"
