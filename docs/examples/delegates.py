"""Rank 0 sends a variable to rank 1: which sends it back doubled, or keeps it for its own loss."""

import chainer
import chainer.functions as F
import numpy as np

import chainermn


def there_and_back(comm) -> np.ndarray | None:
    """Return on rank 0 the gradient of the sum of what comes back."""
    if comm.rank == 1:
        h = chainermn.functions.recv(comm, rank=0)
        chainermn.functions.send(2 * h, comm, rank=0).backward()
        return None
    x = chainer.Variable(np.ones(3, np.float32))
    delegate = chainermn.functions.send(x, comm, rank=1)
    y = chainermn.functions.recv(comm, rank=1, delegate_variable=delegate)
    F.sum(y).backward()
    return x.grad


def there_only(comm) -> np.ndarray | None:
    """Return on rank 0 the gradient of the sum of a loss there and of one on rank 1."""
    if comm.rank == 1:
        F.sum(2 * chainermn.functions.recv(comm, rank=0)).backward()
        return None
    x = chainer.Variable(np.ones(3, np.float32))
    delegate = chainermn.functions.send(x, comm, rank=1)
    loss = F.sum(x)
    (loss,) = chainermn.functions.pseudo_connect(delegate, loss)
    loss.backward()
    return x.grad


def main() -> None:
    comm = chainermn.create_communicator()
    if comm.size != 2:
        raise ValueError(f"expected 2 ranks, got {comm.size}")
    gradients = {f.__name__: f(comm) for f in (there_and_back, there_only)}
    if comm.rank == 0:
        for name, gradient in gradients.items():
            print(f"{name}: {gradient}")


if __name__ == "__main__":
    main()
