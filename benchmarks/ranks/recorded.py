"""Train on a GPU with a timeline: ``recorded.py FILE NETWORK BATCH ITERATIONS [prefetch]``."""

from __future__ import annotations

import os
import sys
import tempfile

import chainer
import numpy as np

import chainermn
from benchmarks.ranks import networks
from benchmarks.ranks.with_chainer import make_optimizer, use_device
from chainermn.extensions import Timeline

_BATCHES = 4  # of examples, read again and again


def main() -> None:
    file, network, batch, iterations, *options = sys.argv[1:]
    chainer.global_config.dtype = chainer.mixed16
    comm = chainermn.create_communicator()
    device = use_device(comm, on_gpu=True)
    made = networks.make(network)
    model = chainer.links.Classifier(made.model)
    model.to_device(device)
    optimizer = make_optimizer(comm, mixed=True).setup(model)
    x, t = made.examples(_BATCHES * int(batch))
    examples = chainer.datasets.TupleDataset(x.astype(np.float16), t)
    batches = chainer.iterators.SerialIterator(examples, int(batch), shuffle=False)
    convert = chainer.dataset.concat_examples
    if "prefetch" in options:
        batches, convert = chainermn.iterators.prefetch_to_device(batches, convert, device)
    updater = chainer.training.StandardUpdater(batches, optimizer, convert, device)
    with tempfile.TemporaryDirectory() as out:
        trainer = chainer.training.Trainer(updater, (int(iterations), "iteration"), out=out)
        trainer.extend(Timeline(comm, os.path.abspath(file)))
        trainer.run()


if __name__ == "__main__":
    main()
