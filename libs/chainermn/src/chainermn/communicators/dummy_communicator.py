"""An exchange that does nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase
from chainermn.transport.reducer import Array, Reducers, Steps


class DummyCommunicator(MpiCommunicatorBase):
    """No exchange, only the copies for one. Use it to measure how long the exchange takes.

    Never train with it: the replicas become different.
    """

    sends_rows = exchanges = False

    @staticmethod
    def average(
        buffer: Array, reducers: Reducers, divisor: int, wire_dtype: np.dtype[Any] | None
    ) -> Steps:
        yield from ()
