#!/usr/bin/env python3
"""Train as train.py does, with the encoder on one rank and the decoder on another."""

from collections.abc import Sequence
from pathlib import Path

import chainer
import chainer.functions as F
import numpy as np
from chainer.training import StandardUpdater, extensions

import chainermn
import saved
import training
from batches import BucketIterator, to_batch
from chainermn.agreement import exit_together
from chainermn.extensions import StopOnSignal, multi_node_snapshot, record_run
from chainermn.functions import pseudo_connect, recv, send
from chainermn.links import create_multi_node_n_step_rnn
from chainermn.optimizers import GradientClipping
from chainermn.progress import silence
from corpus import ParallelText
from models.lstm import Decoder, Encoder
from models.translator import count_tokens, cross_entropy
from text import load_text
from train import (
    add_reports,
    check,
    create_evaluator,
    create_trainer,
    finish,
    parse_arguments,
    save,
    set_up,
    settings,
    sizes,
)

DECODER, ENCODER = 0, 1  # rank 0 prints, so it is the one that knows the loss


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    if args.quiet:
        silence()
    comm = chainermn.create_communicator(args.communicator)
    device = set_up(args, comm)
    with exit_together(comm):
        check(args)
        if comm.size != 2:
            raise ValueError(f"this script takes two ranks, got {comm.size}")
        if args.model != "lstm" or args.share_embedding or args.mixed16:
            raise ValueError("this script takes no Transformer, --share-embedding or --mixed16")
        if args.evaluate is not None:
            raise ValueError("evaluate by train.py --evaluate")
        text = load_text(args, comm)
    about = saved.describe(args.model, sizes(args), text.corpus)
    whole = saved.create(about, args.dropout)
    whole.to_device(device)
    if comm.rank == ENCODER:
        model = EncoderHalf(comm, whole.encoder, rank_out=DECODER)
    else:
        model = DecoderHalf(comm, whole.decoder, rank_in=ENCODER)
    optimizer_class, rate = training.OPTIMIZERS[args.optimizer]
    # Not a multi-node optimizer: only this rank has gradients of its half.
    optimizer = optimizer_class(**{rate: args.lr})
    optimizer.setup(model)
    optimizer.add_hook(GradientClipping(args.clip, comm))

    # Both ranks work on the same batches.
    pairs = ParallelText(text.corpus, comm.bcast_obj(text.train))
    batches = BucketIterator(pairs, args.batchsize, args.seed)
    updater = StandardUpdater(batches, optimizer, converter=to_batch, device=device)
    evaluator = create_evaluator(args, comm, text, whole, device)
    trainer = create_trainer(args, comm, text, updater, evaluator)

    @chainer.training.make_extension(trigger=(1, "epoch"), priority=evaluator.priority + 1)
    def unite(trainer: chainer.training.Trainer) -> None:
        """Give both ranks both halves, for evaluation, and for rank 0 to save."""
        for half, owner in ((whole.encoder, ENCODER), (whole.decoder, DECODER)):
            for _, parameter in sorted(half.namedparams()):
                parameter.array[...] = comm.bcast(parameter.array, root=owner)

    trainer.extend(unite)
    snapshot = extensions.snapshot(savefun=save, n_retains=3)
    snapshot = multi_node_snapshot(comm, snapshot, [DECODER, ENCODER], settings(args, text))
    trainer.extend(snapshot)
    trainer.extend(StopOnSignal(comm, snapshot))
    with exit_together(comm):
        if comm.rank == 0:
            add_reports(args, trainer, whole, size=1)
    with exit_together(comm):
        snapshot.resume(trainer, args.resume)
        record_run(comm, vars(args), args.out)
        if comm.rank == 0:
            saved.save_description(Path(args.out), about, text.corpus.settings.subwords)
    trainer.run()
    if comm.rank == 0:
        finish(trainer, evaluator)


class Half(chainer.Chain):
    """A rank's part of a network: the states of its LSTM continue in that of the other rank.

    Parameters
    ----------
    comm : CommunicatorBase
        Communicator of two ranks.
    part : Encoder or Decoder
    rank_in, rank_out : int, optional
        Rank that states come from, and rank that they go to.
    """

    def __init__(
        self,
        comm: chainermn.CommunicatorBase,
        part: Encoder | Decoder,
        rank_in: int | None = None,
        rank_out: int | None = None,
    ) -> None:
        super().__init__()
        self.comm = comm
        with self.init_scope():
            self.part = part
        # Outside init_scope: as a child of two links, the LSTM would be updated twice.
        self.lstm = create_multi_node_n_step_rnn(part.lstm, comm, rank_in, rank_out)


class EncoderHalf(Half):
    """Reads sentences, and sends the result to the decoder."""

    def forward(self, xs: np.ndarray, ys: np.ndarray) -> chainer.Variable:
        """Return a variable to run backward from."""
        *_, hs, sent = self.lstm(self.part.read(xs))
        memory = pseudo_connect(sent, F.pad_sequence(hs, xs.shape[1]))
        return send(memory, self.comm, DECODER)


class DecoderHalf(Half):
    """Writes translations of the sentences that the other rank has read."""

    def forward(self, xs: np.ndarray, ys: np.ndarray) -> chainer.Variable:
        """Return the mean cross entropy of a token; report it, and the number of tokens."""
        state, _, hs, _ = self.lstm(self.part.read(ys))
        # After the states in forward, so before them in backward.
        memory = recv(self.comm, ENCODER, delegate_variable=state)
        loss = cross_entropy(self.part.attend(F.stack(hs), memory, xs)[0], ys)
        chainer.report({"loss": loss, "tokens": count_tokens(xs, ys)}, self)
        return loss


if __name__ == "__main__":
    main()
