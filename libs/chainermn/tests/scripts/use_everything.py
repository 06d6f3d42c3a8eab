"""A script for the ChainerMN in Chainer's wheel, which prints its results.

Run it with both implementations: the output must be the same.
"""

import itertools
import sys
from argparse import Namespace

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer.datasets import SubDataset, TupleDataset
from chainer.training import extensions

import chainermn
import chainermn.functions


class Model(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.hidden = L.Linear(4, 8)
            self.out = L.Linear(8, 3)

    def __call__(self, x):
        return self.out(F.relu(self.hidden(x)))


def arrays(comm):
    own = np.arange(6, dtype=np.float32).reshape(2, 3) + 10 * comm.rank
    yield comm.allreduce(own)
    yield comm.allgather(own)
    yield comm.gather(own, 1)
    yield comm.bcast(own, 1)
    yield comm.scatter((own,) * comm.size, 0)
    yield comm.alltoall((own,) * comm.size)
    yield comm.scatter([own] * comm.size, 0)
    yield comm.alltoall([own] * comm.size)
    if comm.rank == 0:
        comm.send(own, 1, 7)
        comm.send([own, own[0]], 1, 7)
    elif comm.rank == 1:
        yield comm.recv(0, 7)
        yield comm.recv(0, 7)


def objects(comm):
    yield comm.bcast_obj({"from": comm.rank} if comm.rank == 0 else None)
    yield comm.gather_obj(comm.rank, root=1)
    yield comm.allreduce_obj(comm.rank + 1)
    if comm.rank == 0:
        comm.send_obj("text", 1, tag=3)
    elif comm.rank == 1:
        yield comm.recv_obj(0, tag=3)


def data(comm):
    for n in (0, 1, 2, 3, 10, 31):
        for shuffle, equal in itertools.product([False, True], repeat=2):
            for whole in (
                list(range(n)),
                np.arange(n),
                TupleDataset(np.arange(n), np.arange(n) * 2),
                SubDataset(np.arange(n + 2), 1, n + 1),
            ):
                part = chainermn.scatter_dataset(
                    whole if comm.rank == 0 else None,
                    comm,
                    shuffle=shuffle,
                    seed=n + 1,
                    force_equal_length=equal,
                )
                yield np.array(part[:]).tolist()
        yield chainermn.scatter_index(n, comm)
    yield len(chainermn.datasets.create_empty_dataset(part))


def functions(comm):
    x = chainer.Variable(np.ones((2, 2), np.float32) * (comm.rank + 1))
    y = sum(F.sum(part**2) for part in chainermn.functions.allgather(comm, x))
    y.backward()
    yield y.array
    yield x.grad


def evaluation(comm):
    own = np.arange(comm.rank + 1, dtype=np.float32)[:, None] + 10 * comm.rank
    batches = chainer.iterators.SerialIterator(own, 1, repeat=False, shuffle=False)
    model = L.Linear(1, 1, initialW=2, initial_bias=1)
    results = chainermn.extensions.GenericMultiNodeEvaluator(comm, batches, model)(None)
    yield [result.array.tolist() for result in results or ()]


def observation(comm):
    trainer = Namespace(observation={}, updater=Namespace(iteration=1))
    trainer.observation["loss"] = np.array([comm.rank + 1, 7], np.float32)
    chainermn.extensions.ObservationAggregator(comm, "loss", "mean")(trainer)
    yield trainer.observation["mean"]


def training(comm):
    generator = np.random.RandomState(comm.rank)
    x = generator.rand(24, 4).astype(np.float32)
    t = (x.sum(axis=1) % 3).astype(np.int32)
    np.random.seed(0)
    model = L.Classifier(Model())
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.MomentumSGD(0.1), comm)
    optimizer.setup(model)
    optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(1e-3))
    examples = TupleDataset(x, t)
    batches = chainer.iterators.SerialIterator(examples, 8, shuffle=False)
    updater = chainer.training.StandardUpdater(batches, optimizer)
    trainer = chainer.training.Trainer(updater, (4, "epoch"), out=sys.argv[1])
    evaluation = chainer.iterators.SerialIterator(examples, 8, repeat=False, shuffle=False)
    evaluator = chainermn.create_multi_node_evaluator(
        extensions.Evaluator(evaluation, model), comm
    )
    trainer.extend(evaluator)
    log = extensions.LogReport(filename=None)
    trainer.extend(log)
    trainer.run()
    yield optimizer.t
    for row in log.log:
        yield [round(row[f"validation/main/{key}"], 4) for key in ("loss", "accuracy")]
    yield np.round(model.predictor.out.W.array, 4)


PARTS = (arrays, objects, data, functions, evaluation, observation, training)


def main():
    comm = chainermn.create_communicator("naive")
    half = comm.split(comm.rank % 2, comm.rank)
    lines = [f"{comm.rank} of {comm.size}, {comm.intra_rank}, {comm.inter_rank}, {half.size}"]
    for part in PARTS:
        lines += [
            f"{part.__name__}: {np.array2string(v) if isinstance(v, np.ndarray) else v}"
            for v in part(comm)
        ]
    everything = comm.gather_obj(lines)
    if comm.rank == 0:
        print("\n".join(line for lines in everything for line in lines))


if __name__ == "__main__":
    main()
