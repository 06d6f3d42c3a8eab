#!/usr/bin/env python3
"""Train as train.py does, with the encoder on one rank and the decoder on another."""

from pathlib import Path

import chainer
import numpy as np

import chainermn
import evaluation
import training
from batches import BucketIterator, to_batch
from corpus import ParallelText
from models.lstm import LSTM, Decoder
from models.translator import count_tokens, cross_entropy
from train import (
    add_reports,
    describe,
    draw_attention,
    load_pairs,
    parse_arguments,
    print_summary,
    save_description,
)

DECODER, ENCODER = 0, 1  # rank 0 prints, so it is the one that knows the loss


def main() -> None:
    args = parse_arguments()
    comm = chainermn.create_communicator(args.communicator)
    if comm.rank == 0:
        kind = type(comm).__name__
        print(f"ranks: {comm.size}, hosts: {comm.inter_size}, communicator: {kind}", flush=True)
    if comm.size != 2 or args.resume or args.share_embedding:
        reason = "it takes two ranks, and neither --resume nor --share-embedding"
        raise SystemExit(f"error: {reason}" if comm.rank == 0 else 1)
    device = chainer.get_device(f"@cupy:{comm.intra_rank}" if args.gpu else "@numpy")
    device.use()
    np.random.seed(args.seed)
    device.xp.random.seed(args.seed)

    corpus, train, validation = load_pairs(args, comm)

    about = describe(args, corpus)
    whole = LSTM(**about["sizes"], dropout=args.dropout)
    whole.to_device(device)
    model = Half(comm, whole)
    optimizer_class, rate = training.OPTIMIZERS[args.optimizer]
    # Not a multi-node optimizer: each rank has gradients of its own half, and nobody else has.
    optimizer = optimizer_class(**{rate: args.lr})
    optimizer.setup(model)
    optimizer.add_hook(ClippingOfBoth(comm, args.clip))

    # Both ranks work on the same batches.
    train = comm.bcast_obj(train)
    validation = chainermn.scatter_dataset(
        validation, comm, shuffle=True, seed=args.seed, force_equal_length=False
    )
    text = ParallelText(corpus, train)
    batches = BucketIterator(text, args.batchsize, args.seed)

    updater = training.Updater(batches, optimizer, to_batch, device, args.seed, comm.rank)
    stop = training.early_stopping(comm, args.patience, args.epoch)
    trainer = chainer.training.Trainer(updater, stop, out=args.out)
    evaluator = evaluation.TranslationEvaluator(comm, validation, corpus, whole, device)

    @chainer.training.make_extension(trigger=(1, "epoch"), priority=evaluator.priority + 1)
    def unite(trainer: chainer.training.Trainer) -> None:
        """Give both ranks both halves, to evaluate with, and rank 0 to save."""
        for half, owner in ((whole.encoder, ENCODER), (whole.decoder, DECODER)):
            for _, parameter in sorted(half.namedparams()):
                parameter.array[...] = comm.bcast(parameter.array, root=owner)
        if comm.rank == 0:
            chainer.serializers.save_npz(Path(args.out, "model.npz"), whole)

    trainer.extend(unite)
    trainer.extend(evaluator)
    decay = training.PlateauDecay(comm, rate, args.lr, args.decay, args.decay_patience)
    trainer.extend(decay)
    if comm.rank == 0:
        add_reports(trainer, size=1)
        save_description(Path(args.out), about)

    trainer.run()
    if comm.rank == 0:
        draw_attention(Path(args.out), whole, corpus, evaluator.examples)
        print_summary(trainer, evaluator.examples)


class Half(chainer.Chain):
    """What this rank computes of a network.

    Parameters
    ----------
    comm : CommunicatorBase
        Of two ranks.
    whole : LSTM
    """

    def __init__(self, comm: chainermn.CommunicatorBase, whole: LSTM) -> None:
        super().__init__()
        self.is_decoder = comm.rank == DECODER
        with self.init_scope():
            self.part = chainermn.MultiNodeChainList(comm)
        if self.is_decoder:
            self.part.add_link(Batch(), rank_in=None, rank_out=DECODER)
            self.part.add_link(Loss(whole.decoder), rank_in=[DECODER, ENCODER], rank_out=None)
        else:
            self.part.add_link(whole.encoder, rank_in=None, rank_out=DECODER)

    def forward(self, xs: np.ndarray, ys: np.ndarray) -> chainer.Variable:
        """Return the loss, or on the encoder's rank what to run backward from."""
        if not self.is_decoder:
            return self.part(xs)
        loss = self.part(xs, ys)
        chainer.report({"loss": loss, "tokens": count_tokens(xs, ys)}, self)
        return loss


class Batch(chainer.Link):
    """Hands the batch of this rank on."""

    def forward(self, *batch: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return the arguments."""
        return batch


class Loss(chainer.Chain):
    """Decodes what another rank has encoded."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        with self.init_scope():
            self.decoder = decoder

    def forward(
        self, batch: tuple[np.ndarray, np.ndarray], encoded: tuple[chainer.Variable, ...]
    ) -> chainer.Variable:
        """Return the mean cross entropy of a token."""
        h, c, memory = encoded
        xs, ys = batch
        return cross_entropy(self.decoder((h, c), memory, xs, ys)[0], ys)


class ClippingOfBoth:
    """Gradient clipping by the norm of the gradients of all ranks together.

    Parameters
    ----------
    comm : CommunicatorBase
    threshold : float
        The largest norm.
    """

    name = "ClippingOfBoth"
    timing = "pre"

    def __init__(self, comm: chainermn.CommunicatorBase, threshold: float) -> None:
        self.comm, self.threshold = comm, threshold

    def __call__(self, optimizer: chainer.Optimizer) -> None:
        """Scale the gradients. Collective."""
        gradients = [p.grad for p in optimizer.target.params() if p.grad is not None]
        squares = np.array(sum(float((g * g).sum()) for g in gradients))
        norm = float(self.comm.allreduce(squares)) ** 0.5
        if norm > self.threshold:
            for gradient in gradients:
                gradient *= self.threshold / norm


if __name__ == "__main__":
    main()
