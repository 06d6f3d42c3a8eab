"""NCCL's names, where CuPy brings them: nothing is imported before one is asked for."""

from __future__ import annotations

from typing import Any

from chainermn.transport.gpu.device import Gpu

_NAMES = frozenset(
    {
        *("NCCL_FLOAT", "NCCL_FLOAT16", "NCCL_FLOAT32", "NCCL_FLOAT64", "NCCL_SUM"),
        *("NcclCommunicator", "NcclError"),
        *("get_build_version", "get_unique_id", "get_version"),
    }
)


def __getattr__(name: str) -> Any:
    """Return one of NCCL's names, or as ``_available`` whether they are there.

    Raises
    ------
    AttributeError
        If there is no such name, or no CuPy that has NCCL.
    """
    if name not in _NAMES and name != "_available":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        nccl = Gpu.nccl()
    except ImportError:
        if name == "_available":
            return False
        message = f"{__name__}.{name} needs a CuPy with NCCL, which is not installed"
        raise AttributeError(message) from None
    return True if name == "_available" else getattr(nccl, name)
