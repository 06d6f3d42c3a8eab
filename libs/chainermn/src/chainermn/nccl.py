"""NCCL's functions and constants from CuPy, which is imported only when one is used.

For example, ``chainermn.nccl.get_version()`` returns the version of NCCL, and
``chainermn.nccl._available`` tells whether NCCL is available.
"""

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
    """Return the object of this name from CuPy; ``_available`` tells whether NCCL is there.

    Raises
    ------
    AttributeError
        If there is no such name, or no CuPy with NCCL.
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
