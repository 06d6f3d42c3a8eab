"""Which gradients are exchanged together while backward computes others."""

from __future__ import annotations

from typing import Any

import chainer
import numpy as np

from chainermn.gradients.buckets import Wire
from chainermn.gradients.overlap.plan import Plan

MIB = 1 << 20


def sizes(arrays: list[Any]) -> list[int]:
    """Return the sizes of buckets in MiB."""
    parameters = [chainer.Parameter(array) for array in arrays]
    plan = Plan(parameters, Wire(None, None), 1)
    return [
        sum(parameters[index].array.nbytes for index in bucket.members) // MIB
        for bucket in plan.buckets
    ]


def test_buckets_in_gpu_memory_are_larger(stand_in: Any) -> None:
    in_host_memory = [np.zeros(MIB, np.int8).view(np.float32) for _ in range(60)]
    assert sizes(in_host_memory) == [2] * 30
    assert sizes([stand_in.to_gpu(array) for array in in_host_memory]) == [25, 25, 10]
