#!/usr/bin/env python3
"""Score a network and two baselines on a test set: copies of the source, nearest neighbors."""

import argparse
import json
import signal
from collections.abc import Sequence
from pathlib import Path

import chainer

from chainermn.datasets.names import shown
from chainermn.datasets.texts import LONGEST_LINE, Form, read_lines
from chainermn.files import exit_on_error, optional_path
from chainermn.progress import Progress
from evaluation import METRICS, is_exact
from models import Translator
from neighbors import nearest
from saved import load_network
from translate import LONGEST_SENTENCE, translate
from vocabulary import Vocabulary


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    with exit_on_error():
        device = chainer.get_device("@cupy:0" if args.gpu else "@numpy")
        device.use()
        model, *vocabularies, form = load_network(args.network)
        sources, references = read_pairs(args.source, args.target, form, LONGEST_SENTENCE)
        if args.train_source:
            train = read_pairs(args.train_source, args.train_target, form)
    model.to_device(device)
    found = {
        "network": translate_all(model, *vocabularies, sources, args.beam, args.batchsize),
        "copy of the source": sources,
    }
    if args.train_source:
        found["nearest neighbor"] = [train[1][i] for i in nearest(sources, train[0])]
    scores = {name: score(translations, references) for name, translations in found.items()}
    print(f"{len(sources)} sentences{'':13} BLEU    chrF   exact")
    for name, row in scores.items():
        print(f"{name:25} {row['bleu']:6.2f}  {row['chrf']:6.2f}  {row['exact']:6.2%}")
    if args.out:
        args.out.write_text(json.dumps(scores, indent=1) + "\n", encoding="utf-8")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    network = "best.npz or model.npz, beside its model.json; default: %(default)s"
    add("network", type=Path, nargs="?", default="result/best.npz", help=network)
    add("--source", metavar="FILE", type=Path, required=True, help="lines to translate")
    add("--target", metavar="FILE", type=Path, required=True, help="their translations")
    near = "lines to find the nearest neighbor in"
    add("--train-source", metavar="FILE", type=optional_path, help=near)
    add("--train-target", metavar="FILE", type=optional_path, help="their translations")
    add("--beam", type=int, default=4, help="width of the beam; default: %(default)s")
    add("--batchsize", "-b", type=int, default=32, help="batch size, in lines")
    add("--gpu", "-g", action="store_true", help="translate on GPU")
    out = "also write the scores to this file (JSON)"
    add("--out", "-o", metavar="FILE", type=optional_path, help=out)
    args = parser.parse_args(argv)
    if (args.train_source is None) != (args.train_target is None):
        parser.error("--train-source and --train-target belong together")
    return args


def read_pairs(
    source: Path, target: Path, form: Form, longest: int = LONGEST_LINE
) -> tuple[list[str], list[str]]:
    """Return the lines of two files, without pairs of which one is not UTF-8.

    Raises
    ------
    OSError, ValueError
        If they cannot be read, are not translations line for line, or have a line of more bytes.
    """
    first, second = list(read_lines(source, longest, form)), list(read_lines(target, form=form))
    if len(first) != len(second):
        raise ValueError(
            f"the files must be translations line for line, but {shown(source)} has {len(first)} "
            f"lines and {shown(target)} has {len(second)}"
        )
    pairs = [pair for pair in zip(first, second, strict=True) if None not in pair]
    if not pairs:
        both = f"{shown(source)} and {shown(target)}"
        raise ValueError(f"{both} have no pair of lines in UTF-8")
    return [source for source, _ in pairs], [target for _, target in pairs]


def translate_all(
    model: Translator,
    source: Vocabulary,
    target: Vocabulary,
    lines: list[str],
    beam: int,
    batchsize: int,
) -> list[str]:
    """Translate lines, in batches of similar length, with a progress bar."""
    order = sorted(range(len(lines)), key=lambda i: len(source.encode(lines[i])))
    translations = [""] * len(lines)
    bar = Progress(len(lines), "translations")
    for at in range(0, len(lines), batchsize):
        batch = order[at : at + batchsize]
        found = translate(model, source, target, [lines[i] for i in batch], beam)
        for i, translation in zip(batch, found, strict=True):
            translations[i] = translation
        bar.step(len(batch))
    return translations


def score(translations: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Return BLEU and chrF, by sacreBLEU, and the share of exact matches."""
    found = {
        name: metric.corpus_score(translations, [references]).score
        for name, metric in METRICS.items()
    }
    found["exact"] = sum(map(is_exact, translations, references)) / len(references)
    return found


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # ends without a message in front of head
    main()
