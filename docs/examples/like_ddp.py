"""The same as ddp.py with Chainer, without a trainer."""

import chainer
import numpy as np
from chainer.iterators import SerialIterator

import chainermn

np.random.seed(0)
inputs = np.random.randn(120, 10).astype(np.float32)
train = chainer.datasets.TupleDataset(inputs, (inputs.sum(axis=1) > 0).astype(np.int32))

comm = chainermn.create_communicator()
rank, size = comm.rank, comm.size

sampler = chainermn.create_distributed_sampler(train, comm, seed=0)
batches = SerialIterator(train, 6, order_sampler=sampler)

model = chainer.links.Linear(10, 2)
optimizer = chainer.optimizers.Adam()
optimizer = chainermn.create_multi_node_optimizer(optimizer, comm)
optimizer.setup(model)

while batches.epoch < 4:
    x, t = chainer.dataset.concat_examples(next(batches))
    model.cleargrads()
    loss = chainer.functions.softmax_cross_entropy(model(x), t)
    loss.backward()
    optimizer.update()  # averages the gradients

total = comm.allreduce(loss.array)
if rank == 0:
    chainer.serializers.save_npz("model.npz", model)
