"""``chainermn.launch.run``: a function on several ranks, and all that can become of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from chainermn.launch import run

pytestmark = pytest.mark.each_mpi

OFFSET = 10


class Refused(Exception):
    """An exception of a module that no rank can import."""


def ranks_of(world: Any) -> np.ndarray:
    return np.array(world.allgather(world.rank))


def add_up(numbers: np.ndarray) -> tuple[int, np.ndarray]:
    from mpi4py import MPI

    return MPI.COMM_WORLD.rank, numbers + OFFSET + ranks_of(MPI.COMM_WORLD).sum()


@pytest.mark.parametrize("ranks", [1, 3])
def test_results_by_rank(ranks: int) -> None:
    results = run(add_up, np.arange(3), ranks=ranks)
    expected = np.arange(3) + OFFSET + sum(range(ranks))
    assert [rank for rank, _ in results] == list(range(ranks))
    for _, numbers in results:
        np.testing.assert_array_equal(numbers, expected)
