"""Train one model per rank, each on its own part of noisy data, and average what they predict.

``mpiexec -n 3 python ensemble.py alone``, or ``together``: then the mean itself is trained.
"""

import argparse

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

import chainermn


def curve(n, noise, seed):
    """Return x and y, each of shape (n, 1), of a noisy sine."""
    generator = np.random.RandomState(seed)
    x = generator.uniform(-2, 2, (n, 1))
    y = np.sin(3 * x) + noise * generator.randn(n, 1)
    return x.astype(np.float32), y.astype(np.float32)


def ensemble(comm, model, x):
    """Return the mean of what the models of all ranks predict for the same x."""
    predictions = chainermn.functions.allgather(comm, model(x))
    return sum(predictions) / comm.size


def alone(comm, model, x, y):
    """Return the loss of this rank's model on its own part of the data."""
    part = slice(*chainermn.scatter_index(len(x), comm))
    return F.mean_squared_error(model(x[part]), y[part])


def together(comm, model, x, y):
    """Return this rank's share of the loss of the mean."""
    return F.mean_squared_error(ensemble(comm, model, x), y) / comm.size


def main() -> None:
    losses = {f.__name__: f for f in (alone, together)}
    parser = argparse.ArgumentParser()
    parser.add_argument("trained", choices=losses)
    loss = losses[parser.parse_args().trained]
    comm = chainermn.create_communicator()
    np.random.seed(comm.rank)
    model = chainer.Sequential(L.Linear(1, 20), F.tanh, L.Linear(20, 20), F.tanh, L.Linear(20, 1))
    x, y = curve(90, noise=0.4, seed=0)
    optimizer = chainer.optimizers.Adam(0.05).setup(model)
    for _ in range(120):
        optimizer.update(loss, comm, model, x, y)

    x, y = curve(500, noise=0, seed=1)
    with chainer.no_backprop_mode():
        mean = ensemble(comm, model, x)
        errors = comm.allgather_obj(F.mean_squared_error(model(x), y).item())
    if comm.rank == 0:
        print("each alone:", *(f"{error:.2g}" for error in errors))
        print(f"mean of all: {F.mean_squared_error(mean, y).item():.2g}")


if __name__ == "__main__":
    main()
