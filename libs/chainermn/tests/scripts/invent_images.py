"""A script for the original ChainerMN: two networks and optimizers, and a custom updater."""

import argparse

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import training
from chainer.training import extensions

import chainermn


class Generator(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.linear = L.Linear(5, 4 * 4 * 4)
            self.bn = L.BatchNormalization(4 * 4 * 4)
            self.deconv = L.Deconvolution2D(4, 3, 4, 2, 1)

    def __call__(self, z):
        h = F.relu(self.bn(self.linear(z)))
        return F.sigmoid(self.deconv(F.reshape(h, (len(z), 4, 4, 4))))


class Discriminator(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.conv = L.Convolution2D(3, 4, 4, 2, 1)
            self.linear = L.Linear(4 * 4 * 4, 1)

    def __call__(self, x):
        return self.linear(F.leaky_relu(self.conv(x)))


class TwoPlayers(training.updaters.StandardUpdater):
    def __init__(self, *args, **kwargs):
        self.gen, self.dis = kwargs.pop("models")
        super().__init__(*args, **kwargs)

    def update_core(self):
        batch = self.get_iterator("main").next()
        real = chainer.Variable(self.converter(batch, self.device))
        noise = np.random.RandomState(self.iteration).randn(len(batch), 5).astype(np.float32)
        fake = self.gen(noise)
        said_of_real, said_of_fake = self.dis(real), self.dis(fake)
        self.get_optimizer("dis").update(self.loss_dis, said_of_fake, said_of_real)
        self.get_optimizer("gen").update(self.loss_gen, said_of_fake)

    def loss_dis(self, said_of_fake, said_of_real):
        loss = F.mean(F.softplus(-said_of_real)) + F.mean(F.softplus(said_of_fake))
        chainer.report({"loss": loss}, self.dis)
        return loss

    def loss_gen(self, said_of_fake):
        loss = F.mean(F.softplus(-said_of_fake))
        chainer.report({"loss": loss}, self.gen)
        return loss


def to_unit(image):
    return image / 255


parser = argparse.ArgumentParser()
parser.add_argument("--batchsize", "-b", type=int, default=50)
parser.add_argument("--communicator", type=str, default="pure_nccl")
parser.add_argument("--dataset", "-i", default="")
parser.add_argument("--epoch", "-e", type=int, default=1000)
parser.add_argument("--out", "-o", default="result")
parser.add_argument("--snapshot_interval", type=int, default=1000)
args = parser.parse_args()

np.random.seed(0)
comm = chainermn.create_communicator(args.communicator)
gen, dis = Generator(), Discriminator()


def make_optimizer(model):
    optimizer = chainer.optimizers.Adam(alpha=0.0002, beta1=0.5)
    optimizer = chainermn.create_multi_node_optimizer(optimizer, comm)
    optimizer.setup(model)
    optimizer.add_hook(chainer.optimizer.WeightDecay(0.0001), "hook_dec")
    return optimizer


opt_gen, opt_dis = make_optimizer(gen), make_optimizer(dis)
train = None
if comm.rank == 0:
    images = chainer.datasets.ImageDataset("images.txt", root=args.dataset)
    train = chainer.datasets.TransformDataset(images, to_unit)
train = chainermn.scatter_dataset(train, comm)
train_iter = chainer.iterators.SerialIterator(train, args.batchsize, shuffle=False)
updater = TwoPlayers(
    models=(gen, dis), iterator=train_iter, optimizer={"gen": opt_gen, "dis": opt_dis}, device=-1
)
trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out)
if comm.rank == 0:
    snapshot_interval = (args.snapshot_interval, "iteration")
    trainer.extend(
        extensions.snapshot(filename="snapshot_iter_{.updater.iteration}.npz"),
        trigger=snapshot_interval,
    )
    for name, network in (("gen", gen), ("dis", dis)):
        filename = name + "_iter_{.updater.iteration}.npz"
        trainer.extend(extensions.snapshot_object(network, filename), trigger=snapshot_interval)
    trainer.extend(extensions.LogReport(trigger=(1, "epoch")))
    trainer.extend(extensions.PrintReport(["epoch", "iteration", "gen/loss", "dis/loss"]))
    trainer.extend(extensions.ProgressBar(update_interval=10))
trainer.run()
