"""By what a buffer of gradients travels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from chainermn.transport.gpu.reducers import GpuReducers
    from chainermn.transport.host.reducers import Reducers


class Route(NamedTuple):
    """What an algorithm has at its disposal.

    Attributes
    ----------
    reducers : Reducers or GpuReducers
        For host memory, or for GPU memory.
    divisor : int
        By which the sum over the ranks is to be divided.
    wire_dtype : dtype or None
        To which the algorithm rounds what travels; None: nothing is rounded.
    """

    reducers: Reducers | GpuReducers
    divisor: int
    wire_dtype: np.dtype[Any] | None
