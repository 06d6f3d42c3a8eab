"""An evaluator whose result is not a mean: how often each class was taken for each."""

import chainer
import numpy as np
from small_training import make_trainer

import chainermn
from chainermn.extensions import GenericMultiNodeEvaluator


class ConfusionMatrix(GenericMultiNodeEvaluator):
    def calc_local(self, x, t):
        """Each rank, for each of its batches."""
        guesses = self._targets["main"].predictor(x).array.argmax(axis=1)
        counts = np.zeros((2, 2), int)
        np.add.at(counts, (t, guesses), 1)
        return counts

    def aggregate(self, results):
        """On rank 0, with the results of all batches of all ranks."""
        print(f"{sum(results).sum()} examples")


def main() -> None:
    comm = chainermn.create_communicator()
    trainer = make_trainer(comm, epochs=1, out="result")
    model = trainer.updater.get_optimizer("main").target
    examples = trainer.updater.get_iterator("main").dataset
    part = chainermn.scatter_dataset(examples if comm.rank == 0 else None, comm)
    batches = chainer.iterators.SerialIterator(part, 7, repeat=False, shuffle=False)
    trainer.extend(ConfusionMatrix(comm, batches, model))  # on every rank
    trainer.run()


if __name__ == "__main__":
    main()
