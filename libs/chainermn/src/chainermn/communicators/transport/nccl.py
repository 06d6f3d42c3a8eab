"""NCCL, by way of CuPy."""

from __future__ import annotations

from typing import Any


def load_nccl() -> Any:
    """Import CuPy's NCCL module.

    Raises
    ------
    ImportError
        If CuPy is not installed, or was built without NCCL.
    """
    from cupy.cuda import nccl

    return nccl
