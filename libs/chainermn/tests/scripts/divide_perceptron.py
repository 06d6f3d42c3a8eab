"""A script for the original ChainerMN: model parallelism, plus data parallelism on 4 ranks.

The first rank of a replica has the input and output layers, the second one the layer in between.
"""

import argparse

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer.training import StandardUpdater, Trainer, extensions

import chainermn
import chainermn.datasets
import chainermn.functions


class Layer(chainer.Chain):
    def __init__(self, n_in, n_out):
        super().__init__()
        with self.init_scope():
            self.linear = L.Linear(n_in, n_out)

    def __call__(self, x):
        return F.relu(self.linear(x))


class Ends(chainermn.MultiNodeChainList):
    def __init__(self, comm, n_units):
        super().__init__(comm=comm)
        self.add_link(Layer(784, n_units), rank_in=None, rank_out=1)
        self.add_link(Layer(n_units, 10), rank_in=1, rank_out=None)


class Middle(chainermn.MultiNodeChainList):
    def __init__(self, comm, n_units):
        super().__init__(comm=comm)
        self.add_link(Layer(n_units, n_units), rank_in=0, rank_out=0)


parser = argparse.ArgumentParser()
parser.add_argument("--batchsize", "-b", type=int, default=100)
parser.add_argument("--epoch", "-e", type=int, default=20)
parser.add_argument("--gpu", "-g", action="store_true")
parser.add_argument("--out", "-o", default="result")
parser.add_argument("--unit", "-u", type=int, default=1000)
args = parser.parse_args()

np.random.seed(0)
comm = chainermn.create_communicator("hierarchical" if args.gpu else "naive")
data_axis, model_axis = comm.rank % 2, comm.rank // 2
data_comm = comm.split(data_axis, comm.rank)
model_comm = comm.split(model_axis, comm.rank)

if model_comm.rank == 0:
    model = L.Classifier(Ends(model_comm, args.unit))
else:
    model = Middle(model_comm, args.unit)
optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.Adam(), data_comm)
optimizer.setup(model)

train, test = chainer.datasets.get_mnist()
if model_comm.rank == 0:
    train = chainermn.scatter_dataset(train if data_comm.rank == 0 else None, data_comm)
    test = chainermn.scatter_dataset(test if data_comm.rank == 0 else None, data_comm)
else:
    n_train, n_test = (-(-len(dataset) // data_comm.size) for dataset in (train, test))
    train = chainermn.datasets.create_empty_dataset(train[:n_train])
    test = chainermn.datasets.create_empty_dataset(test[:n_test])
train_iter = chainer.iterators.SerialIterator(train, args.batchsize, shuffle=False)
test_iter = chainer.iterators.SerialIterator(test, args.batchsize, repeat=False, shuffle=False)

trainer = Trainer(StandardUpdater(train_iter, optimizer), (args.epoch, "epoch"), out=args.out)
evaluator = extensions.Evaluator(test_iter, model)
trainer.extend(chainermn.create_multi_node_evaluator(evaluator, data_comm))
if comm.rank == 0:
    trainer.extend(extensions.LogReport())
    trainer.extend(extensions.PrintReport(["epoch", "main/loss", "validation/main/accuracy"]))
trainer.run()
