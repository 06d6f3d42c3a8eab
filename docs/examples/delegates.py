"""Rank 0 sends a variable to rank 1 and gets it back doubled; and sends one without an answer."""

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
    # begin order
    delegate = chainermn.functions.send(x, comm, rank=1)
    y = chainermn.functions.recv(comm, rank=1, delegate_variable=delegate)
    # end order
    F.sum(y).backward()
    return x.grad


def there_only(comm) -> np.ndarray | None:
    """Return on rank 0 the gradient of a loss there and of one on rank 1."""
    if comm.rank == 1:
        F.sum(2 * chainermn.functions.recv(comm, rank=0)).backward()
        return None
    x = chainer.Variable(np.ones(3, np.float32))
    delegate = chainermn.functions.send(x, comm, rank=1)
    loss = F.sum(x)
    # begin tie
    (loss,) = chainermn.functions.pseudo_connect(delegate, loss)
    loss.backward()
    # end tie
    return x.grad


def main() -> None:
    comm = chainermn.create_communicator()
    gradients = there_and_back(comm), there_only(comm)
    if comm.rank == 0:
        print(*(gradient.tolist() for gradient in gradients))


if __name__ == "__main__":
    main()
