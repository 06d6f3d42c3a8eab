"""A script for the original ChainerMN: listed images, worker processes and checkpoints."""

import argparse
import multiprocessing

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import training
from chainer.training import extensions

import chainermn


class Preprocessed(chainer.dataset.DatasetMixin):
    def __init__(self, path, root, mean):
        self.base = chainer.datasets.LabeledImageDataset(path, root)
        self.mean = mean

    def __len__(self):
        return len(self.base)

    def get_example(self, i):
        image, label = self.base[i]
        return (image - self.mean) / 255, label


class TestModeEvaluator(extensions.Evaluator):
    def evaluate(self):
        self.get_target("main").train = False
        result = super().evaluate()
        self.get_target("main").train = True
        return result


class Network(chainer.Chain):
    train = True

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.conv = L.Convolution2D(3, 4, 3)
            self.bn = L.BatchNormalization(4)
            self.out = L.Linear(4 * 6 * 6, 3)

    def __call__(self, x, t):
        with chainer.using_config("train", self.train):
            loss = F.softmax_cross_entropy(self.out(F.relu(self.bn(self.conv(x)))), t)
        chainer.report({"loss": loss}, self)
        return loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("train")
    parser.add_argument("val")
    parser.add_argument("--batchsize", "-B", type=int, default=32)
    parser.add_argument("--communicator", default="hierarchical")
    parser.add_argument("--epoch", "-E", type=int, default=10)
    parser.add_argument("--loaderjob", "-j", type=int)
    parser.add_argument("--mean", "-m", default="mean.npy")
    parser.add_argument("--out", "-o", default="result")
    parser.add_argument("--root", "-R", default=".")
    parser.add_argument("--val_batchsize", "-b", type=int, default=250)
    args = parser.parse_args()

    multiprocessing.set_start_method("forkserver")
    first = multiprocessing.Process()
    first.start()
    first.join()

    np.random.seed(0)
    comm = chainermn.create_communicator(args.communicator)
    model = Network()
    mean = np.load(args.mean)
    if comm.rank == 0:
        train = Preprocessed(args.train, args.root, mean)
        val = Preprocessed(args.val, args.root, mean)
    else:
        train = val = None
    train = chainermn.scatter_dataset(train, comm, shuffle=True, seed=2)
    val = chainermn.scatter_dataset(val, comm)
    MultiprocessIterator = chainer.iterators.MultiprocessIterator
    train_iterator = MultiprocessIterator(train, args.batchsize, n_processes=args.loaderjob)
    val_iterator = MultiprocessIterator(
        val, args.val_batchsize, repeat=False, n_processes=args.loaderjob
    )

    optimizer = chainer.optimizers.MomentumSGD(lr=0.01, momentum=0.9)
    optimizer = chainermn.create_multi_node_optimizer(optimizer, comm)
    optimizer.setup(model)
    updater = training.StandardUpdater(train_iterator, optimizer)
    trainer = training.Trainer(updater, (args.epoch, "epoch"), args.out)
    checkpointer = chainermn.create_multi_node_checkpointer(
        name="images", comm=comm, path=args.out
    )
    checkpointer.maybe_load(trainer, optimizer)
    trainer.extend(checkpointer, trigger=(1, "epoch"))
    evaluator = TestModeEvaluator(val_iterator, model)
    trainer.extend(chainermn.create_multi_node_evaluator(evaluator, comm))
    trainer.extend(chainermn.extensions.AllreducePersistent(model, comm))
    if comm.rank == 0:
        trainer.extend(extensions.DumpGraph("main/loss"))
        trainer.extend(extensions.LogReport())
        trainer.extend(extensions.observe_lr())
        trainer.extend(extensions.PrintReport(["epoch", "main/loss", "validation/main/loss"]))
        trainer.extend(extensions.ProgressBar(update_interval=10))
    trainer.run()


if __name__ == "__main__":
    main()
