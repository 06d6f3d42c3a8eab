"""No exchange at all."""

from __future__ import annotations

from typing import Any

import numpy as np

from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase
from chainermn.transport.reducer import Array, Reducers, Steps


class DummyCommunicator(MpiCommunicatorBase):
    """No exchange, only the copies that one needs: for measuring what the exchange costs.

    The replicas drift apart: never train with it.
    """

    sends_rows = False

    @staticmethod
    def average(
        buffer: Array, reducers: Reducers, divisor: int, wire_dtype: np.dtype[Any] | None
    ) -> Steps:
        yield from ()
