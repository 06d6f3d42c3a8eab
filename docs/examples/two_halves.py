"""A model on two ranks: the first layer here, the second one there."""

import chainer.functions as F
import chainer.links as L
import numpy as np

import chainermn


def main() -> None:
    comm = chainermn.create_communicator()
    np.random.seed(0)  # the same layers on both ranks, to compare with
    first, second = L.Linear(4, 3), L.Linear(3, 2)
    x = np.random.randn(2, 4).astype(np.float32)
    t = np.array([0, 1], np.int32)
    # begin
    if comm.rank == 0:
        first.cleargrads()
        h = F.relu(first(x))
        delegate = chainermn.functions.send(h, comm, rank=1)
        delegate.backward()
    else:
        second.cleargrads()
        h = chainermn.functions.recv(comm, rank=0)
        loss = F.softmax_cross_entropy(second(h), t)
        loss.backward()
    # end
    if comm.rank == 0:
        received = first.W.grad.copy()
        first.cleargrads()
        F.softmax_cross_entropy(second(F.relu(first(x))), t).backward()
        print("as in one process:", np.allclose(first.W.grad, received))


if __name__ == "__main__":
    main()
