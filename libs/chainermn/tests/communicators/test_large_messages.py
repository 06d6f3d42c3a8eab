"""Messages too large for one MPI call."""

from __future__ import annotations

import numpy as np
import pytest

from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.transport.host import mpi
from chainermn.transport.host.mpi import MpiTransport, world

pytestmark = pytest.mark.each_mpi


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "MAX_COUNT", 7)


@pytest.mark.mpi(1, 2, 3)
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("dtype", ["int8", "float16", "float64"])
def test_in_chunks(dtype: str) -> None:
    transport = MpiTransport(world())
    everywhere = [np.arange(23).astype(dtype) + rank for rank in range(transport.size)]
    total = np.sum(everywhere, axis=0)
    own = everywhere[transport.rank]

    array = own.copy()
    transport.allreduce(array)
    np.testing.assert_array_equal(array, total)

    array = own.copy()
    transport.bcast(array, root=transport.size - 1)
    np.testing.assert_array_equal(array, everywhere[-1])

    array = np.empty_like(own)
    dest, source = transport.rank - 1, transport.rank + 1
    transport.sendrecv(own, dest % transport.size, array, source % transport.size)
    np.testing.assert_array_equal(array, everywhere[source % transport.size])


@pytest.mark.nightly
@pytest.mark.mpi(2, timeout=120)
def test_more_than_2_gib(comm: CommunicatorBase) -> None:
    size = 2**31 + 16
    array = None
    if comm.rank == 0:
        array = np.zeros(size, np.uint8)
        array[[0, 2**31 - 1, -1]] = [1, 2, 3]
    array = comm.bcast(array)
    assert array.shape == (size,)
    assert array[[0, 1, 2**31 - 1, -1]].tolist() == [1, 0, 2, 3]
