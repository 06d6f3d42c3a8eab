"""What helps on a slow network, each on its own."""

import chainer
import numpy as np

import chainermn


def power_sgd(comm):
    optimizer = chainer.optimizers.MomentumSGD(lr=0.1)
    compression = chainermn.compression.PowerSGD(rank=4, start_iteration=100)
    optimizer = chainermn.create_multi_node_optimizer(optimizer, comm, compression=compression)
    return optimizer


def top_k(comm):
    compression = chainermn.compression.TopK(density=0.01, momentum=0.9)
    optimizer = chainer.optimizers.SGD(lr=0.1)
    optimizer = chainermn.create_multi_node_optimizer(optimizer, comm, compression=compression)
    return optimizer


def accumulated(comm):
    optimizer = chainer.optimizers.MomentumSGD(lr=0.1)
    optimizer = chainermn.create_multi_node_optimizer(optimizer, comm, accumulate=4)
    return optimizer


def local(comm):
    optimizer = chainer.optimizers.MomentumSGD(lr=0.1)
    local = chainermn.optimizers.LocalSGD(period=8, start_iteration=100)
    optimizer = chainermn.create_multi_node_optimizer(optimizer, comm, local=local)
    return optimizer


def uneven(comm):
    optimizer = chainer.optimizers.MomentumSGD(lr=0.1)
    optimizer = chainermn.create_multi_node_optimizer(optimizer, comm, uneven=True)
    return optimizer


def compressed_and_local(comm):
    return chainermn.create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(lr=0.03),
        comm,
        compression=chainermn.compression.PowerSGD(rank=8),
        local=chainermn.optimizers.LocalSGD(period=4),
    )


def train(comm, optimizer):
    """Return the loss before and after learning a linear map from examples of all ranks."""
    np.random.seed(0)
    model = chainer.links.Classifier(
        chainer.links.Linear(64, 32), lossfun=chainer.functions.mean_squared_error
    )
    model.compute_accuracy = False
    optimizer.setup(model)
    target = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    random = np.random.default_rng(comm.rank)
    losses = []
    for _ in range(60):
        x = random.normal(size=(32, 64)).astype(np.float32)
        optimizer.update(model, x, x @ target)
        losses.append(float(model.loss.array))
    return losses[0], losses[-1]


def main() -> None:
    comm = chainermn.create_communicator()
    for make in (power_sgd, top_k, accumulated, local, uneven, compressed_and_local):
        before, after = train(comm, make(comm))
        if comm.rank == 0:
            print(f"{make.__name__}: {'learns' if after < before / 2 else 'does not learn'}")


if __name__ == "__main__":
    main()
