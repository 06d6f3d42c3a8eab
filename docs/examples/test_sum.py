import numpy as np
import pytest

import chainermn


@pytest.mark.mpi(1, 2, timeout=10)
def test_sum():
    comm = chainermn.create_communicator()
    assert comm.allreduce(np.array(comm.rank)) == sum(range(comm.size))
