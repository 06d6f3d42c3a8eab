"""Decide whether to use CUDA-aware MPI."""

from __future__ import annotations

import os

#: If this is 1, MPI gets the addresses of arrays in GPU memory, except those it would have to sum.
#: ``chainermn doctor`` tries the same calls.
VARIABLE = "CHAINERMN_CUDA_AWARE"


def is_cuda_aware() -> bool:
    """Tell whether the user has declared MPI to be CUDA-aware.

    An MPI that is not CUDA-aware crashes when given GPU memory, and an MPI that reports CUDA
    support may still lack it. So the default is to copy through host memory.
    """
    return os.environ.get(VARIABLE, "0") not in ("", "0")
