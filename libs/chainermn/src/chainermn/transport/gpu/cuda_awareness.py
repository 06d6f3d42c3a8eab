"""Whether to use CUDA-aware MPI."""

from __future__ import annotations

import os

#: If set to 1, MPI is given the address of arrays in GPU memory that it only moves; ``chainermn
#: doctor`` tries the same calls.
VARIABLE = "CHAINERMN_CUDA_AWARE"


def is_cuda_aware() -> bool:
    """Tell whether the user has declared MPI to be CUDA-aware.

    An MPI that is not crashes when given GPU memory, and an MPI that reports CUDA support may
    still lack it. So the default is to copy through host memory.
    """
    return os.environ.get(VARIABLE, "0") not in ("", "0")
