"""How long every communicator takes to exchange gradients over the hosts, with each wire dtype."""

from __future__ import annotations

import time
from typing import Any

ELEMENTS = 1 << 18
_TIMES = 3


def examine() -> dict[str, Any] | None:
    """Return, on rank 0: seconds for 1 MiB by communicator and wire dtype, and the default."""
    import chainer
    import numpy as np

    import chainermn
    from chainermn.communicators.registry import default_on_cpu
    from chainermn.doctor.probes.communicators import usable
    from chainermn.transport.topology import Topology

    world = chainermn.create_communicator("naive")
    model = chainer.Chain()
    with model.init_scope():
        model.weight = chainer.Parameter(np.zeros(ELEMENTS, np.float32))
    model.weight.grad = np.zeros(ELEMENTS, np.float32)
    seconds: dict[str, dict[str, float]] = {}
    for name in usable(world.mpi_comm):
        for dtype in ("float32", "bfloat16"):
            comm = chainermn.create_communicator(name, allreduce_grad_dtype=dtype)
            comm.multi_node_mean_grad(model)  # sets up connections and buffers
            taken = []
            for _ in range(_TIMES):
                world.mpi_comm.Barrier()
                start = time.perf_counter()
                comm.multi_node_mean_grad(model)
                taken.append(time.perf_counter() - start)
            seconds.setdefault(name, {})[dtype] = min(taken)
    default = default_on_cpu(Topology.of(world.mpi_comm))
    return {"default": default, "seconds": seconds} if world.rank == 0 else None
