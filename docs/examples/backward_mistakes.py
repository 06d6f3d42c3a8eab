"""Four mistakes of backward on two ranks, to see what each of them does.

mpiexec -n 2 python backward_mistakes.py no_delegate
"""

import argparse

import chainer
import chainer.functions as F
import numpy as np

import chainermn
from chainermn.functions import recv, send


def no_delegate(comm) -> None:
    """What comes back is not tied to what was sent."""
    for step in (1, 2):
        if comm.rank == 1:
            send(2 * recv(comm, rank=0), comm, rank=0).backward()
        else:
            x = ones()
            send(x, comm, rank=1)
            F.sum(recv(comm, rank=1)).backward()
            print(f"step {step}: gradient {x.grad}", flush=True)


def not_tied(comm) -> None:
    """The loss of rank 0 is not tied to what was sent."""
    if comm.rank == 1:
        F.sum(2 * recv(comm, rank=0)).backward()
    else:
        x = ones()
        send(x, comm, rank=1)
        F.sum(x).backward()
        print(f"gradient {x.grad}")


def too_early(comm) -> None:
    """Rank 0 waits for the gradient of x before it sends the one that rank 1 needs for it."""
    if comm.rank == 1:
        send(2 * recv(comm, rank=0), comm, rank=0).backward()
    else:
        delegate = send(ones(), comm, rank=1)
        y = recv(comm, rank=1)
        delegate.backward()
        F.sum(y).backward()


def no_backward(comm) -> None:
    """Rank 1 does not run backward."""
    if comm.rank == 1:
        recv(comm, rank=0)
    else:
        send(ones(), comm, rank=1).backward()


def ones() -> chainer.Variable:
    return chainer.Variable(np.ones(3, np.float32))


if __name__ == "__main__":
    mistakes = {f.__name__: f for f in (no_delegate, not_tied, too_early, no_backward)}
    parser = argparse.ArgumentParser()
    parser.add_argument("mistake", choices=mistakes)
    make = mistakes[parser.parse_args().mistake]
    comm = chainermn.create_communicator()
    if comm.size != 2:
        raise ValueError(f"expected 2 ranks, got {comm.size}")
    make(comm)
