#!/usr/bin/env python3
"""Measure the speedup of all ranks over a single rank.

The two are measured in turn, in one job, so that other load on the machine slows both. Every rank
has a batch of the same size in memory, so this measures the computation and the exchange of
gradients, but not the reading of images.
"""

import argparse
import statistics
import time

import chainer
import numpy as np

import chainermn
from models import ARCHITECTURES
from training import Classifier


def main() -> None:
    args = parse_arguments()
    comm = chainermn.create_communicator(args.communicator)
    alone, together = (prepare(args, c) for c in (comm.split(comm.rank, 0), comm))
    estimate = comm.bcast_obj(max(seconds(alone, 2), seconds(together, 2)))

    pairs = []
    for _ in range(args.rounds):
        if comm.rank == 0:
            one = seconds(alone, args.iterations)
        else:
            time.sleep(0.5 * estimate * args.iterations)  # waiting for a message occupies a core
        comm.bcast_obj(None)
        every = seconds(together, args.iterations)
        if comm.rank == 0:
            pairs.append((args.batchsize / one, args.batchsize * comm.size / every))

    if comm.rank == 0:
        single, all_ranks = (statistics.median(rates) for rates in zip(*pairs, strict=True))
        efficiency = statistics.median(b / a / comm.size for a, b in pairs)
        best = max(b for _, b in pairs) / max(a for a, _ in pairs) / comm.size
        print(f"{args.arch}, batches of {args.batchsize}, median of {args.rounds} rounds:")
        print(f"  1 rank   {single:8.1f} images/s")
        print(f"  {comm.size} ranks  {all_ranks:8.1f} images/s")
        print(f"  parallel efficiency {efficiency:.0%}; of the best rounds {best:.0%}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--arch", "-a", choices=sorted(ARCHITECTURES), default="small")
    add("--batchsize", "-B", type=int, default=32, help="batch size per process")
    add("--iterations", type=int, default=20, help="iterations per round; default: %(default)s")
    add("--rounds", type=int, default=15, help="default: %(default)s")
    add("--communicator", help="default: chosen for your hosts and GPUs")
    return parser.parse_args()


def prepare(args: argparse.Namespace, comm: chainermn.CommunicatorBase):
    """Return a function that takes a step with the ranks of a communicator."""
    network = ARCHITECTURES[args.arch](1000)
    model = Classifier(network)
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.MomentumSGD(1e-3), comm)
    optimizer.setup(model)
    size = network.insize
    x = np.random.rand(args.batchsize, 3, size, size).astype(np.float32)
    t = np.random.randint(0, 1000, args.batchsize).astype(np.int32)
    return lambda: optimizer.update(model, x, t)


def seconds(step, iterations: int) -> float:
    """Return the time of a step."""
    start = time.perf_counter()
    for _ in range(iterations):
        step()
    return (time.perf_counter() - start) / iterations


if __name__ == "__main__":
    main()
