"""Check the wire dtype: the dtype in which gradients are sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from chainermn import remedies

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

_NAMES = ("float16", "bfloat16", "float32", "float64")
# CuPy 14 does not support bfloat16 with an older NumPy.
_NUMPY_FOR_BFLOAT16 = "2.1.2"


def as_wire_dtype(dtype: DTypeLike | None) -> np.dtype[Any] | None:
    """Return the wire dtype for a value of the setting ``allreduce_grad_dtype``.

    Raises
    ------
    ValueError
        If the value is neither None nor one of the supported dtypes.
    """
    if dtype is None:
        return None
    try:
        if isinstance(dtype, str) and dtype == "bfloat16":
            import ml_dtypes  # NumPy itself does not know bfloat16

            wire = np.dtype(ml_dtypes.bfloat16)
        else:
            wire = np.dtype(dtype)
    except TypeError:
        wire = None
    if wire is None or wire.name not in _NAMES:
        raise ValueError(
            f"allreduce_grad_dtype must be {', '.join(_NAMES)} or None (the dtype of the "
            f"gradients), got {dtype!r}"
        )
    return wire


def why_not_on_gpu(wire: np.dtype[Any] | None) -> str | None:
    """Return why gradients in GPU memory cannot be sent in this dtype, or None if they can."""
    if wire is None or wire.name != "bfloat16":
        return None
    if np.lib.NumpyVersion(np.__version__) >= _NUMPY_FOR_BFLOAT16:
        return None
    return (
        f"in GPU memory, allreduce_grad_dtype='bfloat16' needs NumPy {_NUMPY_FOR_BFLOAT16} or "
        f"newer, as CuPy does, but this is NumPy {np.__version__}; run: "
        + remedies.pip("install", f"numpy>={_NUMPY_FOR_BFLOAT16}")
    )
