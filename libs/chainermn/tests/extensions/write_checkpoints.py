"""Write checkpoints forever; or, with ``resume``, print which one is loaded."""

import sys
from itertools import count

import chainer
import numpy as np


def main(path: str, *resume: str) -> None:
    import chainermn
    from chainermn.extensions import create_multi_node_checkpointer

    comm = chainermn.create_communicator("naive")
    model = chainer.Link()
    with model.init_scope():
        model.x = chainer.Parameter(np.zeros(200_000))
    checkpointer = create_multi_node_checkpointer("job", comm, 3, 3, path)
    if resume:
        checkpointer.maybe_load(model)
        loaded = comm.allgather(model.x.array)
        assert all((x == loaded[0][0]).all() for x in loaded)
        if comm.rank == 0:
            print(int(loaded[0][0]))
        return
    for iteration in count(1):
        model.x.array[...] = iteration
        checkpointer.save(model, iteration)


if __name__ == "__main__":
    main(*sys.argv[1:])
