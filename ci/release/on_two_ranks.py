"""Train on two ranks with the installed release; started by ``python -I``."""

import sys
from pathlib import Path

import chainer
import numpy as np

import chainermn

place = Path(chainermn.__file__)
assert place.is_relative_to(sys.prefix), f"chainermn comes from {place}, not from {sys.prefix}"

comm = chainermn.create_communicator()
assert comm.size == 2, f"{comm.size} ranks, not 2: mpiexec and the MPI library do not match"
assert comm.allreduce(np.array([comm.rank + 1.0])) == 3

model = chainer.links.Linear(1, 1, nobias=True, initialW=0)
optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(lr=1), comm).setup(model)
x = np.full((1, 1), comm.rank + 1, np.float32)
for _ in range(2):  # the first update makes the replicas equal and takes no step
    optimizer.update(lambda: chainer.functions.sum(model(x)))
assert model.W.array == -1.5, f"{model.W.array} after a step by the mean of the gradients 1 and 2"
