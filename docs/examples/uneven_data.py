"""Train on ranks with different numbers of batches: rank 0 has 10 examples, rank 1 has 20, ..."""

import chainer
import numpy as np
from chainer import training
from chainer.iterators import SerialIterator
from chainer.training import extensions

import chainermn


class Model(chainer.Chain):
    """Its gradient is minus the mean of the examples."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.w = chainer.Parameter(np.zeros((), np.float32))

    def forward(self, x):
        chainer.report({"mean": x.mean()}, self)
        return -self.w * x.mean()


def main() -> None:
    comm = chainermn.create_communicator()
    # Rank 0 has ones, rank 1 threes, rank 2 fives, ...
    data = np.full(10 * (comm.rank + 1), 2 * comm.rank + 1, np.float32)
    model = Model()
    optimizer = chainer.optimizers.SGD(lr=1)
    optimizer = chainermn.create_multi_node_optimizer(optimizer, comm, uneven=True)
    optimizer.setup(model)
    updater = training.StandardUpdater(SerialIterator(data, 5), optimizer)
    trainer = training.Trainer(updater, (2, "epoch"), out="result")
    evaluator = extensions.Evaluator(SerialIterator(data, 5, repeat=False), model)
    evaluator = chainermn.create_multi_node_evaluator(evaluator, comm, mean_over="examples")
    trainer.extend(evaluator, trigger=(1, "epoch"))  # on every rank, by epochs
    trainer.run()
    print(
        f"rank {comm.rank}: {updater.iteration} batches, {optimizer.t} steps, "
        f"weight {model.w.array}, mean {trainer.observation['validation/main/mean']:.3f}"
    )


if __name__ == "__main__":
    main()
