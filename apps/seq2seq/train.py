#!/usr/bin/env python3
"""Train an encoder-decoder with attention to translate."""

import argparse
import json
from pathlib import Path

import chainer
import matplotlib
import numpy as np
from chainer.optimizer_hooks import GradientClipping
from chainer.training import extensions

import chainermn
import evaluation
import terminal
import training
from batches import BucketIterator, cut_batches, hold_out, to_batch
from corpus import Corpus, ParallelText, Settings, load_corpus, together
from models import MODELS, Translator
from vocabulary import EOS


def main() -> None:
    args = parse_arguments()
    comm = chainermn.create_communicator(args.communicator)
    if comm.rank == 0:
        kind = type(comm).__name__
        print(f"ranks: {comm.size}, hosts: {comm.inter_size}, communicator: {kind}", flush=True)
    device = chainer.get_device(f"@cupy:{comm.intra_rank}" if args.gpu else "@numpy")
    device.use()
    np.random.seed(args.seed)
    device.xp.random.seed(args.seed)

    corpus, train, validation = load_pairs(args, comm)
    if args.resume:
        together(comm, lambda: training.check_snapshot(args.resume, corpus.digest()))

    about = describe(args, corpus)
    model = MODELS[about["model"]](**about["sizes"], dropout=args.dropout)
    model.to_device(device)
    optimizer_class, rate = training.OPTIMIZERS[args.optimizer]
    optimizer = optimizer_class(**{rate: args.lr})
    optimizer = chainermn.create_multi_node_optimizer(optimizer, comm)
    optimizer.setup(model)
    optimizer.add_hook(GradientClipping(args.clip))

    train = chainermn.scatter_dataset(train, comm)
    validation = chainermn.scatter_dataset(
        validation, comm, shuffle=True, seed=args.seed, force_equal_length=False
    )
    text = ParallelText(corpus, train[:])
    batches = BucketIterator(text, args.batchsize, args.seed)

    updater = training.Updater(batches, optimizer, to_batch, device, args.seed, comm.rank)
    stop = training.early_stopping(comm, args.patience, args.epoch)
    trainer = chainer.training.Trainer(updater, stop, out=args.out)
    evaluator = evaluation.TranslationEvaluator(comm, validation, corpus, model, device)
    trainer.extend(evaluator)
    decay = training.PlateauDecay(comm, rate, args.lr, args.decay, args.decay_patience)
    trainer.extend(decay)
    if comm.rank == 0:
        add_reports(trainer, comm.size)
        filename = "snapshot_epoch_{.updater.epoch}"
        trainer.extend(extensions.snapshot(filename=filename, n_retains=3))
        trainer.extend(training.Fingerprint(corpus.digest()))
        save_description(Path(args.out), about)

    if args.resume:
        chainer.serializers.load_npz(args.resume, trainer)
    trainer.run()
    if comm.rank == 0:
        draw_attention(Path(args.out), model, corpus, evaluator.examples)
        print_summary(trainer, evaluator.examples)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--source", metavar="FILE", type=Path, help="lines to translate; by default, dates")
    add("--target", metavar="FILE", type=Path, help="their translations, line for line")
    add("--cache", metavar="DIR", type=Path, help="for indices and vocabularies; default: in OUT")
    add("--hold-out", type=int, default=1000, help="pairs to validate with; default: %(default)s")
    add("--min-count", type=int, default=1, help="of a token, to be in a vocabulary")
    add("--max-vocabulary", type=int, default=30000, help="tokens; default: %(default)s")
    add("--max-length", type=int, default=50, help="tokens; longer pairs are skipped")
    add("--batchsize", "-b", type=int, default=64, help="pairs of a process in one step")
    add("--epoch", "-e", type=int, default=6, help="how often to go through the data at most")
    add("--model", choices=sorted(MODELS), default="lstm", help="default: %(default)s")
    add("--unit", "-u", type=int, default=128, help="size of embeddings and hidden states")
    add("--layer", "-l", type=int, default=1, help="layers of encoder and decoder")
    add("--dropout", type=float, default=0.1, help="default: %(default)s")
    add("--share-embedding", action="store_true", help="one vocabulary and embedding for all")
    add("--optimizer", choices=sorted(training.OPTIMIZERS), default="adam")
    add("--lr", type=float, default=0.002, help="learning rate; default: %(default)s")
    add("--clip", type=float, default=1, help="largest norm of a gradient; default: %(default)s")
    add("--decay", type=float, default=0.5, help="factor for the learning rate on a plateau")
    add("--decay-patience", type=int, default=1, help="epochs that make a plateau")
    add("--patience", type=int, default=4, help="epochs without progress before stopping early")
    add("--communicator", help="default: chosen for the hosts and GPUs at hand")
    add("--gpu", "-g", action="store_true", help="train on GPU")
    add("--seed", type=int, default=0, help="of the first weights and of all shuffling")
    add("--out", "-o", metavar="DIR", default="result", help="for log, pictures and snapshots")
    add("--resume", "-r", metavar="FILE", help="snapshot to go on from")
    args = parser.parse_args()
    if (args.source is None) != (args.target is None):
        parser.error("--source and --target belong together")
    return args


def load_pairs(
    args: argparse.Namespace, comm: chainermn.CommunicatorBase
) -> tuple[Corpus, np.ndarray | None, list[np.ndarray] | None]:
    """Return the corpus and, on rank 0, which pairs to train on and batches to validate with."""
    cache = args.cache or Path(args.out, "corpus")
    settings = Settings(args.min_count, args.max_vocabulary, args.max_length, args.share_embedding)
    corpus, index = load_corpus(args.source, args.target, cache, settings, args.seed, comm)
    if comm.rank != 0:
        return corpus, None, None
    train, validation = hold_out(index, args.hold_out, args.seed)
    source, target = map(len, corpus.vocabularies)
    skipped = ", ".join(f"{n} {reason}" for reason, n in corpus.skipped.items()) or "none"
    print(
        f"{len(train)} pairs to train on, {len(validation)} to validate with, skipped: {skipped}"
    )
    print(f"vocabularies of {source} and {target} tokens", flush=True)
    return corpus, train, cut_batches(validation, args.batchsize)


def describe(args: argparse.Namespace, corpus: Corpus) -> dict:
    """Return what has to be known to use the network."""
    source, target = corpus.vocabularies
    sizes = {
        "n_source": len(source),
        "n_target": len(target),
        "n_units": args.unit,
        "n_layers": args.layer,
        "share_embedding": args.share_embedding,
    }
    return {"model": args.model, "sizes": sizes, "vocabularies": [source.tokens, target.tokens]}


def save_description(out: Path, about: dict) -> None:
    """Write what translate.py needs beside a snapshot."""
    out.mkdir(parents=True, exist_ok=True)
    content = json.dumps(about, ensure_ascii=False) + "\n"
    (out / "model.json").write_text(content, encoding="utf-8")


def add_reports(trainer: chainer.training.Trainer, size: int) -> None:
    trainer.extend(extensions.LogReport(postprocess=training.mean_speed(size)))

    matplotlib.use("Agg")  # draws into files, whether there is a screen or not
    curves = {
        "loss": ["main/loss", "validation/main/loss"],
        "score": ["validation/main/bleu", "validation/main/chrf"],
        "exact": ["validation/main/exact"],
    }
    for name, keys in curves.items():
        trainer.extend(extensions.PlotReport(keys, "epoch", filename=f"{name}.png"))

    columns = ["epoch", "main/loss", "validation/main/loss", "validation/main/exact"]
    columns += ["validation/main/bleu", "validation/main/chrf", "lr", "tokens/s", "elapsed_time"]
    if terminal.is_watched():
        trainer.extend(extensions.PrintReport(columns))
        trainer.extend(extensions.ProgressBar(update_interval=10))
    else:
        trainer.extend(extensions.PrintReport(columns, out=terminal.PlainOutput()))


def draw_attention(
    out: Path, model: Translator, corpus: Corpus, examples: list[tuple[str, str, str]]
) -> None:
    """Draw what the model attends to when it translates the longest of the examples."""
    if not examples:  # resumed where there was nothing left to do
        return
    first, second = corpus.vocabularies
    source, _, translation = max(examples, key=lambda example: len(first.encode(example[0])))
    xs, ys = (v.encode(line)[None] for v, line in ((first, source), (second, translation)))
    weights = model.attend(model.xp.asarray(xs), model.xp.asarray(ys))[0]
    read, written = ([v.tokens[i] for i in row[0]] for v, row in ((first, xs), (second, ys)))
    written.append(second.tokens[EOS])
    evaluation.draw_attention(weights, read, written, out / "attention.png")


def print_summary(trainer: chainer.training.Trainer, examples: list[tuple[str, str, str]]) -> None:
    for source, reference, translation in examples[:: max(len(examples) // 4, 1)][:4]:
        mark = "=" if translation == reference else "instead of"
        print(f"  {source}\n    {translation}  {mark}  {reference}")
    last = trainer.get_extension("LogReport").log[-1]
    exact, epoch = last["validation/main/exact"], last["epoch"]
    plural = "epoch" if epoch == 1 else "epochs"
    print(f"{exact:.2%} of the validation data translated exactly after {epoch} {plural}")
    print(f"BLEU {last['validation/main/bleu']:.4f}, chrF {last['validation/main/chrf']:.4f}")
    files = "loss.png,score.png,exact.png,attention.png,log"
    print(f"curves, attention and log: {Path(trainer.out).resolve()}/{{{files}}}")


if __name__ == "__main__":
    main()
