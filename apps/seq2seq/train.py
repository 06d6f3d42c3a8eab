#!/usr/bin/env python3
"""Train a network to translate."""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import chainer
import matplotlib
import numpy as np
from chainer.serializers import save_npz
from chainer.training import StandardUpdater, Trainer, extensions

import chainermn
import evaluation
import saved
import training
from batches import BucketIterator, to_batch
from chainermn.agreement import exit_together, run_on_root
from chainermn.extensions import (
    BestModel,
    DistributedReport,
    StepSeed,
    StopOnSignal,
    TensorBoardReport,
    TerminalReport,
    Throughput,
    multi_node_snapshot,
    record_run,
)
from chainermn.files import optional_path
from chainermn.optimizers import GradientClipping
from chainermn.progress import silence
from corpus import ParallelText
from models import MODELS, Translator
from text import Text, load_text, readable

# Options that may change when a run is resumed. The digests of the text replace the files.
FREE = {"source", "target", "validation_source", "validation_target", "cache", "epoch", "patience"}
FREE |= {"subwords", "communicator", "gpu", "out", "resume", "evaluate", "tensorboard", "quiet"}
# Compressing weights takes more than ten times as long, and saves almost no space.
save = partial(save_npz, compression=False)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    if args.quiet:
        silence()
    comm = chainermn.create_communicator(args.communicator)
    device = set_up(args, comm)
    with exit_together(comm):
        check(args)
        path, form = Path(args.evaluate or Path(args.out, "best.npz")), "NFC"
        if args.evaluate is not None:
            form = run_on_root(comm, 0, "--evaluate", lambda: saved.normal_form(path))
        text = load_text(args, comm, form)
        about = saved.describe(args.model, sizes(args), text.corpus)
        model = saved.create(about, args.dropout)
        if args.evaluate is not None:
            run_on_root(comm, 0, "--evaluate", lambda: saved.load_again(path, model, about))
    model.to_device(device)
    evaluator = create_evaluator(args, comm, text, model, device)
    if args.evaluate is not None:
        comm.bcast_data(model)
        scores = evaluator(None)
        if comm.rank == 0:
            print_scores(scores, evaluator.examples)
        return

    optimizer_class, rate = training.OPTIMIZERS[args.optimizer]
    optimizer = optimizer_class(**{rate: args.lr})
    optimizer = chainermn.create_multi_node_optimizer(optimizer, comm)
    optimizer.setup(model)
    optimizer.add_hook(GradientClipping(args.clip))
    if args.mixed16:
        optimizer.use_fp32_update()
        optimizer.loss_scaling()

    pairs = ParallelText(text.corpus, chainermn.scatter_dataset(text.train, comm)[:])
    batches = BucketIterator(pairs, args.batchsize, args.seed)
    updater = StandardUpdater(batches, optimizer, converter=to_batch, device=device)
    trainer = create_trainer(args, comm, text, updater, evaluator)
    snapshot = extensions.snapshot(savefun=save, n_retains=3)
    snapshot = multi_node_snapshot(comm, snapshot, [], settings(args, text))
    trainer.extend(snapshot)
    trainer.extend(StopOnSignal(comm, snapshot))
    with exit_together(comm):
        if comm.rank == 0:
            add_reports(args, trainer, model, comm.size)
    with exit_together(comm):
        snapshot.resume(trainer, args.resume)
        record_run(comm, vars(args), args.out)
        if comm.rank == 0:
            saved.save_description(Path(args.out), about, text.corpus.settings.subwords)
    trainer.run()
    if comm.rank == 0:
        finish(trainer, evaluator)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    source = "lines to translate; default: generated dates"
    add("--source", metavar="FILE", type=optional_path, help=source)
    add("--target", metavar="FILE", type=optional_path, help="their translations, line by line")
    add("--validation-source", metavar="FILE", type=optional_path, help="validation lines")
    add("--validation-target", metavar="FILE", type=optional_path, help="their translations")
    cache = "folder for indices and vocabularies; default: in OUT"
    add("--cache", metavar="DIR", type=optional_path, help=cache)
    add("--hold-out", type=int, default=1000, help="validation pairs, if there are no such files")
    subwords = "subword model from prepare.py; default: words"
    add("--subwords", metavar="FILE", type=optional_path, help=subwords)
    add("--min-count", type=int, default=1, help="least count of a token in a vocabulary")
    max_vocabulary = "largest vocabulary; default: %(default)s"
    add("--max-vocabulary", type=int, default=30000, help=max_vocabulary)
    add("--max-length", type=int, default=50, help="skip longer pairs; in tokens")
    add("--batchsize", "-b", type=int, default=64, help="batch size per process, in pairs")
    add("--epoch", "-e", type=int, default=6, help="largest number of epochs")
    add("--model", choices=sorted(MODELS), default="lstm", help="default: %(default)s")
    add("--unit", "-u", type=int, default=128, help="size of embeddings and hidden states")
    add("--layer", "-l", type=int, default=1, help="layers in encoder and decoder")
    add("--head", type=int, default=4, help="heads per attention of a Transformer")
    add("--dropout", type=float, default=0.1, help="default: %(default)s")
    add("--share-embedding", action="store_true", help="share one vocabulary and one embedding")
    add("--optimizer", choices=sorted(training.OPTIMIZERS), default="adam")
    add("--lr", type=float, default=0.002, help="learning rate; default: %(default)s")
    add("--warmup", type=int, default=20, help="steps in which --lr rises; default: %(default)s")
    add("--clip", type=float, default=1, help="largest norm of a gradient; default: %(default)s")
    criterion = "measure of progress on the validation data; default: %(default)s"
    add("--criterion", choices=sorted(training.CRITERIA), default="loss", help=criterion)
    add("--decay", type=float, default=0.5, help="factor for --lr on a plateau")
    plateau = "epochs without progress that make a plateau"
    add("--decay-patience", type=int, default=1, help=plateau)
    add("--patience", type=int, default=4, help="epochs without progress before stopping early")
    add("--mixed16", action="store_true", help="compute in float16, with float32 parameters")
    add("--communicator", help="default: chosen for your hosts and GPUs")
    add("--gpu", "-g", action="store_true", help="train on GPU")
    add("--seed", type=int, default=0, help="seed of initial weights and shuffling")
    out = "folder for log, pictures and snapshots"
    add("--out", "-o", metavar="DIR", default="result", help=out)
    add("--resume", "-r", metavar="FILE", help="snapshot to resume from; default: the newest")
    add("--tensorboard", action="store_true", help="also write the log for TensorBoard")
    add = parser.add_mutually_exclusive_group().add_argument
    evaluate = "do not train; evaluate this network; default: best.npz in OUT"
    add("--evaluate", metavar="FILE", nargs="?", const="", help=evaluate)
    add("--quiet", "-q", action="store_true", help="print only warnings and errors")
    return parser.parse_args(argv)


def check(args: argparse.Namespace) -> None:
    """Raise ValueError if options do not fit."""
    for prefix in ("", "validation_"):
        names = f"{prefix}source", f"{prefix}target"
        if len([name for name in names if getattr(args, name)]) == 1:
            options = (f"--{name.replace('_', '-')}" for name in names)
            raise ValueError(f"{' and '.join(options)} belong together")
    for name in ("hold_out", "batchsize", "epoch", "unit", "layer", "head", "clip", "patience"):
        if not getattr(args, name) > 0:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} must be a positive number, got {getattr(args, name)}")
    if not 0 <= args.dropout < 1:
        raise ValueError(f"--dropout must be at least 0 and less than 1, got {args.dropout}")


def set_up(args: argparse.Namespace, comm: chainermn.CommunicatorBase) -> chainer.backend.Device:
    """Select the device of this rank, seed its random numbers, and return the device."""
    if comm.rank == 0:
        kind = type(comm).__name__
        print(f"ranks: {comm.size}, hosts: {comm.inter_size}, communicator: {kind}", flush=True)
    with exit_together(comm):
        device = chainermn.choose_device(comm, gpu=args.gpu)
    chainer.global_config.dtype = chainer.mixed16 if args.mixed16 else np.float32
    np.random.seed(args.seed)
    device.xp.random.seed(args.seed)
    return device


def sizes(args: argparse.Namespace) -> dict[str, int | bool]:
    """Return the arguments that create a network, except the sizes of the vocabularies."""
    found = {
        "n_units": args.unit,
        "n_layers": args.layer,
        "share_embedding": args.share_embedding,
    }
    return {**found, "n_heads": args.head} if args.model == "transformer" else found


def settings(args: argparse.Namespace, text: Text) -> dict:
    """Return the settings that must stay the same when a run is resumed."""
    values = {name: value for name, value in vars(args).items() if name not in FREE}
    return {**values, "text": text.digests()}


def create_evaluator(
    args: argparse.Namespace,
    comm: chainermn.CommunicatorBase,
    text: Text,
    model: Translator,
    device: chainer.backend.Device,
) -> evaluation.TranslationEvaluator:
    batches = chainermn.scatter_dataset(
        text.validation, comm, shuffle=True, seed=args.seed, force_equal_length=False
    )
    return evaluation.TranslationEvaluator(comm, batches, text.validated, model, device)


def create_trainer(
    args: argparse.Namespace,
    comm: chainermn.CommunicatorBase,
    text: Text,
    updater: StandardUpdater,
    evaluator: evaluation.TranslationEvaluator,
) -> Trainer:
    """Return a trainer with what every rank has."""

    @chainer.training.make_extension(trigger=(1, "epoch"), priority=evaluator.priority + 2)
    def check_text(trainer: Trainer) -> None:
        """End the job before wrong lines get into scores and snapshots."""
        with exit_together(comm):
            text.check()

    stopping = training.EarlyStopping(comm, args.criterion, args.patience)
    trainer = Trainer(updater, training.End(stopping, args.epoch), out=args.out)
    trainer.extend(check_text)
    trainer.extend(stopping)
    trainer.extend(StepSeed(args.seed, comm))
    trainer.extend(evaluator)
    trainer.extend(DistributedReport(comm))
    _, rate = training.OPTIMIZERS[args.optimizer]
    decay = args.decay, args.decay_patience, args.criterion
    trainer.extend(training.LearningRate(comm, rate, args.lr, args.warmup, *decay))
    return trainer


def add_reports(args: argparse.Namespace, trainer: Trainer, model: Translator, size: int) -> None:
    """Add what only rank 0 has."""
    trainer.extend(Throughput("tokens", "main/tokens", size))
    trainer.extend(extensions.LogReport())
    best = training.observation(args.criterion)
    trainer.extend(BestModel(model, best, training.CRITERIA[args.criterion]))
    trainer.extend(extensions.snapshot_object(model, "model.npz", save), trigger=(1, "epoch"))
    if args.tensorboard:
        trainer.extend(TensorBoardReport())

    matplotlib.use("Agg")  # draws into files, even without a screen
    curves = {
        "loss": ["main/loss", "validation/main/loss"],
        "score": ["validation/main/bleu", "validation/main/chrf"],
        "exact": ["validation/main/exact"],
    }
    for name, keys in curves.items():
        trainer.extend(extensions.PlotReport(keys, "epoch", filename=f"{name}.png"))
    columns = ["epoch", "main/loss", *map(training.observation, training.CRITERIA)]
    trainer.extend(TerminalReport([*columns, "lr", "tokens/s", "minutes left"]))


def finish(trainer: Trainer, evaluator: evaluation.TranslationEvaluator) -> None:
    """Draw the attention, and print how good the network and the best one are."""
    out = Path(trainer.out)
    if evaluator.examples:  # none if a run that was over is started again
        evaluation.draw_attention(evaluator, out / "attention.png")
    print_scores(trainer.get_extension("LogReport").log[-1], evaluator.examples)
    best = trainer.get_extension("BestModel")
    name = best.metric.rpartition("/")[2]
    print(f"best.npz: {name} {best.value:.4f} after epoch {best.epoch}")
    names = ["loss.png", "score.png", "exact.png", "attention.png", "log", "best.npz", "model.npz"]
    files = ",".join(name for name in names if (out / name).exists())
    print(f"curves, attention, log and networks: {out.resolve()}/{{{files}}}")


def print_scores(scores: dict[str, float], examples: list[tuple[str, str, str]]) -> None:
    """Print scores of the validation data and some of its translations."""
    for example in examples[:: max(len(examples) // 4, 1)][:4]:
        source, reference, translation = map(readable, example)
        mark = "=" if evaluation.is_exact(translation, reference) else "instead of"
        print(f"  {source}\n    {translation}  {mark}  {reference}")
    loss, exact, bleu, chrf = (
        scores[training.observation(name)] for name in ("loss", "exact", "bleu", "chrf")
    )
    print(f"{exact:.2%} of the validation data translated exactly, loss {loss:.4f}")
    print(f"BLEU {bleu:.4f}, chrF {chrf:.4f}", flush=True)


if __name__ == "__main__":
    main()
