"""Fine-tune on few examples: weights of another training, a new head, a frozen body."""

import io
import sys
from pathlib import Path

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import training
from chainer.iterators import SerialIterator

import chainermn
from chainermn.agreement import run_on_root

PLANES = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)


class Network(chainer.Chain):
    def __init__(self, n_classes):
        super().__init__()
        with self.init_scope():
            self.body = chainer.Sequential(
                L.Linear(20, 64), L.BatchNormalization(64), F.relu, L.Linear(64, 16), F.relu
            )
            self.head = L.Linear(16, n_classes)

    def forward(self, x):
        return self.head(self.body(x))


class FrozenNetwork(Network):
    def forward(self, x):
        with chainer.no_backprop_mode(), chainer.using_config("train", False):
            features = self.body(x)
        return self.head(features)


def examples(n, weights):
    """Return points in 20 dimensions. The class tells on which side of three planes each is."""
    points = np.random.default_rng(n).normal(size=(n, 20)).astype(np.float32)
    sides = (points @ PLANES > 0).astype(np.int32)
    return chainer.datasets.TupleDataset(points, sides @ weights)


def train(comm, network, data, test, batch_size, n_epochs, prepare=None):
    """Train a network on all ranks, and return its accuracy."""
    model = L.Classifier(network)
    zero_fill = not isinstance(network, FrozenNetwork)
    optimizer = chainer.optimizers.Adam(alpha=0.01)
    optimizer = chainermn.create_multi_node_optimizer(optimizer, comm, zero_fill=zero_fill)
    optimizer.setup(model)
    if prepare is not None:
        prepare(network)
    sampler = chainermn.create_distributed_sampler(data, comm, seed=0)
    batches = SerialIterator(data, batch_size // comm.size, order_sampler=sampler)
    updater = training.StandardUpdater(batches, optimizer)
    trainer = training.Trainer(updater, (n_epochs, "epoch"), out="result")
    average = chainermn.extensions.AllreducePersistent(model, comm)
    trainer.extend(average, trigger=(1, "epoch"))  # on every rank
    trainer.run()
    part = chainermn.scatter_dataset(test, comm, force_equal_length=False)
    evaluator = training.extensions.Evaluator(SerialIterator(part, 100, repeat=False), model)
    evaluator = chainermn.create_multi_node_evaluator(evaluator, comm, mean_over="examples")
    return evaluator()["main/accuracy"]


def pretrain(comm, file):
    """Write the weights of a network that tells apart all 8 combinations of sides."""
    network = Network(8)
    data, test = (examples(n, np.array([1, 2, 4])) for n in (2000, 500))
    train(comm, network, data, test, 100, 8)
    if comm.rank == 0:
        chainer.serializers.save_npz(file, network)


def load(comm, file, network):
    contents = run_on_root(comm, 0, "pretrained weights", Path(file).read_bytes)
    chainer.serializers.load_npz(io.BytesIO(contents), network.body, path="body/")


def freeze(network):
    network.body.disable_update()  # on every rank, after optimizer.setup


def slow_down(network):
    for parameter in network.body.params():  # on every rank, after optimizer.setup
        parameter.update_rule.hyperparam.alpha = 1e-4  # Adam's; of other optimizers, lr


def main(file: str) -> None:
    comm = chainermn.create_communicator()
    np.random.seed(0)
    pretrain(comm, file)
    data, test = (examples(n, np.array([1, 2, 0])) for n in (60, 1000))
    for name, kind, prepare in (
        ("from scratch", Network, None),
        ("frozen body", FrozenNetwork, freeze),
        ("slow body", Network, slow_down),
    ):
        network = kind(4)
        if prepare is not None:
            load(comm, file, network)
        before = network.body[0].W.array.copy()
        accuracy = train(comm, network, data, test, 12, 20, prepare)
        if comm.rank == 0:
            change = np.abs(network.body[0].W.array - before).max()
            print(f"{name}: {accuracy:.0%} right, first layer changed by {change:.2g}")


if __name__ == "__main__":
    main(sys.argv[1])
