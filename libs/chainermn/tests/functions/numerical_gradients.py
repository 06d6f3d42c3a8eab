"""Gradients across ranks, from finite differences."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from chainermn.communicators.communicator_base import CommunicatorBase

Loss = Callable[[], float]


def numerical_gradients(
    comm: CommunicatorBase, loss: Loss, arrays: list[np.ndarray], step: float = 1e-5
) -> list[np.ndarray]:
    """Differentiate the sum of all ranks' losses with respect to this rank's arrays (float64)."""
    gradients = [np.zeros_like(array) for array in arrays]
    sizes = comm.allgather_obj([array.size for array in arrays])
    for owner, owned in enumerate(sizes):
        for i, size in enumerate(owned):
            for j in range(size):
                losses = []
                for sign in (1, -1):
                    if comm.rank == owner:
                        before = arrays[i].reshape(-1)[j]
                        arrays[i].reshape(-1)[j] += sign * step
                    losses.append(sum(comm.allgather_obj(float(loss()))))
                    if comm.rank == owner:
                        arrays[i].reshape(-1)[j] = before
                if comm.rank == owner:
                    gradients[i].reshape(-1)[j] = (losses[0] - losses[1]) / (2 * step)
    return gradients
