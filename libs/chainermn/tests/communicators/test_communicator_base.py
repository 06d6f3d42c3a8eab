"""What every communicator inherits, user-defined ones included."""

from __future__ import annotations

from typing import Any

import chainer
import numpy as np
import pytest

from chainermn.communicators.communicator_base import CommunicatorBase

pytestmark = pytest.mark.each_mpi


@pytest.mark.mpi(2)
def test_names_of_the_first_version(comm: Any) -> None:
    model = chainer.links.Linear(2, 2)
    model.W.array[...] = comm.rank + 1
    comm.broadcast_data(model)
    np.testing.assert_array_equal(model.W.array, np.ones((2, 2)))
    model.W.grad = np.full((2, 2), 4.0 * comm.rank, np.float32)
    model.b.grad = None
    comm.allreduce_grad(model)
    np.testing.assert_array_equal(model.W.grad, np.full((2, 2), 2.0))
    assert model.b.grad is None


@pytest.mark.mpi(1, 2)
def test_with_block(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[CommunicatorBase] = []
    monkeypatch.setattr(type(comm), "finalize", lambda self: ends.append(self))
    with pytest.raises(KeyError), comm:
        raise KeyError
    assert ends == []  # the other ranks may never get there
    with comm as entered:
        assert entered is comm
        assert ends == []
    assert ends == [comm]
