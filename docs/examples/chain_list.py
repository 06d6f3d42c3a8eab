"""An encoder and a decoder on rank 0, and what is between them on rank 1."""

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

import chainermn


def main() -> None:
    comm = chainermn.create_communicator()
    np.random.seed(0)  # the same layers on both ranks, to compare with
    encoder, middle, decoder = L.Linear(4, 3), L.Linear(3, 3), L.Linear(3, 2)
    x = np.random.randn(2, 4).astype(np.float32)
    # begin
    model = chainermn.MultiNodeChainList(comm)
    if comm.rank == 0:
        model.add_link(encoder, rank_in=None, rank_out=1)
        model.add_link(decoder, rank_in=1, rank_out=None)
    else:
        model.add_link(middle, rank_in=0, rank_out=0)

    y = model(x)  # on rank 1, a delegate
    loss = F.sum(y)
    loss.backward()
    # end
    if comm.rank == 0:
        expected = decoder(middle(encoder(chainer.Variable(x))))
        print("as in one process:", np.allclose(y.array, expected.array))


if __name__ == "__main__":
    main()
