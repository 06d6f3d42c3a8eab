"""Whether every communicator that runs on CPU averages gradients exactly."""

from __future__ import annotations

from typing import Any

DTYPES = ("float16", "float32", "float64")


def examine() -> dict[str, str] | None:
    """Return, on rank 0: by communicator, what is wrong on any rank; empty if nothing is."""
    import chainermn

    world = chainermn.create_communicator("naive")
    everywhere = world.gather_obj({name: try_out(name) for name in usable(world.mpi_comm)})
    if everywhere is None:
        return None
    return {
        name: next(filter(None, (wrong[name] for wrong in everywhere)), "")
        for name in everywhere[0]
    }


def usable(mpi_comm: Any) -> list[str]:
    """Return the names of the communicators that run on the CPUs of these hosts."""
    from chainermn.communicators import registered
    from chainermn.transport.topology import Topology

    topology = Topology.of(mpi_comm)
    return [
        name
        for name, kind in registered().items()
        if name != "dummy" and not kind.uses_nccl and not kind.why_not(topology)
    ]


def try_out(name: str) -> str:
    """Average gradients of each dtype by one communicator; return what is wrong."""
    import chainermn

    try:
        comm = chainermn.create_communicator(name)
        wrong = [dtype for dtype in DTYPES if not is_exact(comm, dtype)]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"wrong means of {', '.join(wrong)}" if wrong else ""


def is_exact(comm: Any, dtype: str) -> bool:
    """Tell whether means of whole numbers are exact, in arrays of any size."""
    import chainer
    import numpy as np

    model = chainer.Chain()
    with model.init_scope():
        for name, shape in {"matrix": (3, 5), "vector": (40_000,), "number": ()}.items():
            setattr(model, name, chainer.Parameter(np.zeros(shape, dtype)))
    for parameter in model.params():
        # The mean of the first n odd numbers is n.
        parameter.grad = np.full(parameter.shape, 2 * comm.rank + 1, dtype)
    comm.multi_node_mean_grad(model)
    return all(bool((parameter.grad == comm.size).all()) for parameter in model.params())
