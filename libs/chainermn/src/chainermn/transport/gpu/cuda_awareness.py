"""Whether MPI reads and writes GPU memory itself."""

from __future__ import annotations

import os

#: Set to 1, it has MPI get GPU memory. ``chainermn doctor`` verifies that MPI can take it.
VARIABLE = "CHAINERMN_CUDA_AWARE"


def is_cuda_aware() -> bool:
    """Tell whether the user says that MPI takes arrays in GPU memory.

    An MPI that cannot take them crashes, and one that says it can may still not. So GPU memory
    goes through host memory unless the user has decided otherwise.
    """
    return os.environ.get(VARIABLE, "0") not in ("", "0")
