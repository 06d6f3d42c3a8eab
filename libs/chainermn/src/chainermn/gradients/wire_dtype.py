"""The dtype in which gradients travel."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from chainermn.transport.host.casts import BFLOAT16

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase

WIRE_DTYPES = ("float16", "bfloat16", "float32", "float64")

# What is exchanged to measure the link, and how often in each dtype.
_ELEMENTS = 1 << 20
_TIMES = 3

# Rounding must save more than that to be worth it.
_GAIN = 0.8


def as_wire_dtype(
    dtype: DTypeLike | Literal["auto"] | None,
) -> np.dtype[Any] | Literal["auto"] | None:
    """Return the dtype for a value of the setting ``allreduce_grad_dtype``.

    Raises
    ------
    ValueError
        If there is none.
    """
    if dtype is None or (isinstance(dtype, str) and dtype == "auto"):
        return cast(Literal["auto"] | None, dtype)
    wire = BFLOAT16 if isinstance(dtype, str) and dtype == "bfloat16" else np.dtype(dtype)
    if wire.name not in WIRE_DTYPES:
        raise ValueError(
            f"allreduce_grad_dtype must be {', '.join(WIRE_DTYPES)}, 'auto' (measure the link and "
            f"choose) or None (that of the gradients), got {wire.name}"
        )
    return wire


def choose_wire_dtype(communicator: MpiCommunicatorBase) -> np.dtype[Any] | None:
    """Measure whether gradients between hosts travel faster as bfloat16. Collective.

    It has the range of float32, so that nothing can overflow.

    Returns
    -------
    dtype or None
        bfloat16, or None for that of the gradients: always on one host, where there is no link.
        The same on all ranks.
    """
    if communicator.inter_size == 1:
        return None
    buffer = np.zeros(_ELEMENTS, np.float32)
    seconds: dict[np.dtype[Any] | None, float] = {}
    for _ in range(_TIMES):
        for dtype in (None, BFLOAT16):
            communicator.allreduce_grad_dtype = dtype
            start = time.perf_counter()
            communicator._allreduce_mean(buffer)
            seconds[dtype] = min(seconds.get(dtype, np.inf), time.perf_counter() - start)
    is_worth_it = seconds[BFLOAT16] < _GAIN * seconds[None]
    return BFLOAT16 if communicator.mpi_comm.bcast(is_worth_it) else None
