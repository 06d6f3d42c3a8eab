"""A script for the original ChainerMN: data parallelism on MNIST from Chainer's cache."""

import argparse

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import training
from chainer.training import extensions

import chainermn


class Perceptron(chainer.Chain):
    def __init__(self, n_units):
        super().__init__()
        with self.init_scope():
            self.hidden = L.Linear(784, n_units)
            self.out = L.Linear(n_units, 10)

    def __call__(self, x):
        return self.out(F.relu(self.hidden(x)))


parser = argparse.ArgumentParser()
parser.add_argument("--batchsize", "-b", type=int, default=100)
parser.add_argument("--communicator", type=str, default="pure_nccl")
parser.add_argument("--epoch", "-e", type=int, default=20)
parser.add_argument("--gpu", "-g", action="store_true")
parser.add_argument("--out", "-o", default="result")
parser.add_argument("--resume", "-r", default="")
parser.add_argument("--unit", "-u", type=int, default=1000)
args = parser.parse_args()

np.random.seed(0)
comm = chainermn.create_communicator(args.communicator)
device = comm.intra_rank if args.gpu else -1
if args.gpu:
    chainer.cuda.get_device_from_id(device).use()
if comm.mpi_comm.rank == 0:
    print(f"Num process (COMM_WORLD): {comm.size}")

model = L.Classifier(Perceptron(args.unit))
if device >= 0:
    model.to_gpu()
optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.Adam(), comm)
optimizer.setup(model)

train, test = chainer.datasets.get_mnist() if comm.rank == 0 else (None, None)
train = chainermn.scatter_dataset(train, comm, shuffle=True, seed=1)
test = chainermn.scatter_dataset(test, comm, shuffle=True, seed=1)
train_iter = chainer.iterators.SerialIterator(train, args.batchsize, shuffle=False)
test_iter = chainer.iterators.SerialIterator(test, args.batchsize, repeat=False, shuffle=False)

updater = training.StandardUpdater(train_iter, optimizer, device=device)
trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out)
evaluator = extensions.Evaluator(test_iter, model, device=device)
trainer.extend(chainermn.create_multi_node_evaluator(evaluator, comm))
if comm.rank == 0:
    trainer.extend(extensions.DumpGraph("main/loss"))
    trainer.extend(extensions.LogReport())
    trainer.extend(extensions.snapshot(), trigger=(1, "epoch"))
    columns = ["epoch", "main/loss", "validation/main/loss", "validation/main/accuracy"]
    trainer.extend(extensions.PrintReport([*columns, "elapsed_time"]))
    trainer.extend(extensions.ProgressBar())
if args.resume:
    chainer.serializers.load_npz(args.resume, trainer)
trainer.run()
