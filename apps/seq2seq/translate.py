#!/usr/bin/env python3
"""Translate lines from standard input."""

import argparse
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import chainer

from batches import pad
from chainermn.datasets.texts import lines_in
from chainermn.files import exit_on_error
from models import Translator
from saved import load_network
from vocabulary import Vocabulary

# Bytes. Attention takes memory in proportion to the square of a sentence's length.
LONGEST_SENTENCE = 5_000


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    with exit_on_error():
        device = chainer.get_device("@cupy:0" if args.gpu else "@numpy")
        device.use()
        model, source, target, form = load_network(args.network)
    model.to_device(device)
    sys.stdout.reconfigure(encoding="utf-8")
    say = partial(print, file=sys.stderr)
    read = lines_in(sys.stdin.buffer, "standard input", LONGEST_SENTENCE, form, say)
    with exit_on_error():
        for lines in batches((text or "" for _, text in read), args.batchsize):
            for line in translate(model, source, target, lines, args.beam):
                print(line, flush=True)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    network = "best.npz or model.npz, beside its model.json; default: %(default)s"
    add("network", type=Path, nargs="?", default="result/best.npz", help=network)
    add("--beam", type=int, default=1, help="width of the beam; 1, the default, is greedy")
    add("--batchsize", "-b", type=int, default=1, help="batch size, in lines")
    add("--gpu", "-g", action="store_true", help="translate on GPU")
    return parser.parse_args(argv)


def batches(lines: Iterable[str], size: int) -> Iterator[list[str]]:
    """Yield lists of ``size`` lines, the last of which may be shorter."""
    batch = []
    for line in lines:
        batch.append(line)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def translate(
    model: Translator, source: Vocabulary, target: Vocabulary, lines: list[str], beam: int
) -> list[str]:
    """Return the translations of lines; that of an empty line is empty."""
    sentences = [source.encode(line) for line in lines]
    wanted = [i for i, sentence in enumerate(sentences) if len(sentence)]
    translations = [""] * len(lines)
    if wanted:
        xs = pad([sentences[i] for i in wanted])
        for i, row in zip(wanted, model.translate(xs, beam), strict=True):
            translations[i] = target.decode(row.tolist())
    return translations


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # ends without a message in front of head
    main()
