"""Whether every communicator that runs on CPU averages gradients exactly."""

from __future__ import annotations

from typing import Any

DTYPES = ("float16", "float32", "float64")


def examine() -> dict[str, dict[str, str]] | None:
    """Return, on rank 0: by communicator and dtype, ``'right'`` or what is wrong."""
    import chainermn
    from chainermn.communicators import registered

    world = chainermn.create_communicator("naive")
    left_out = {"pure_nccl", "dummy"}
    if world.inter_size > 1:
        left_out.add("single_node")
    if any(world.allgather_obj(world.intra_size * world.inter_size != world.size)):
        left_out.add("two_dimensional")
    results = {name: try_out(name) for name in registered() if name not in left_out}
    everywhere = world.gather_obj(results)
    if everywhere is None:
        return None
    return {
        name: {
            dtype: next((r[name][dtype] for r in everywhere if r[name][dtype] != "right"), "right")
            for dtype in DTYPES
        }
        for name in results
    }


def try_out(name: str) -> dict[str, str]:
    """Average gradients of each dtype by one communicator; compare with what they must be."""
    import chainermn

    try:
        comm = chainermn.create_communicator(name)
        return {dtype: "right" if is_exact(comm, dtype) else "wrong" for dtype in DTYPES}
    except Exception as error:
        return dict.fromkeys(DTYPES, f"{type(error).__name__}: {error}")


def is_exact(comm: Any, dtype: str) -> bool:
    """Tell whether means of whole numbers, in arrays small and large, are what they must be."""
    import chainer
    import numpy as np

    model = chainer.Chain()
    with model.init_scope():
        for name, shape in {"matrix": (3, 5), "vector": (40_000,), "number": ()}.items():
            setattr(model, name, chainer.Parameter(np.zeros(shape, dtype)))
    for parameter in model.params():
        # The mean of the first odd numbers is how many they are.
        parameter.grad = np.full(parameter.shape, 2 * comm.rank + 1, dtype)
    comm.multi_node_mean_grad(model)
    return all(bool((parameter.grad == comm.size).all()) for parameter in model.params())
