#!/usr/bin/env python3
"""Translate lines from standard input."""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import chainer
import numpy as np

from batches import pad
from models import MODELS, Translator
from vocabulary import Vocabulary

IN_SNAPSHOT = "updater/model:main/"


def main() -> None:
    args = parse_arguments()
    device = chainer.get_device("@cupy:0" if args.gpu else "@numpy")
    device.use()
    model, source, target = load(args.snapshot)
    model.to_device(device)
    sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    sys.stdout.reconfigure(encoding="utf-8")
    for lines in batches(sys.stdin, args.batchsize):
        for line in translate(model, source, target, lines, args.beam):
            print(line, flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("snapshot", type=Path, help="such as result/snapshot_epoch_8, beside its model.json")
    add("--beam", type=int, default=1, help="width of the beam; 1, the default, is greedy")
    add("--batchsize", "-b", type=int, default=1, help="lines to translate at a time")
    add("--gpu", "-g", action="store_true", help="translate on GPU")
    return parser.parse_args()


def load(snapshot: Path) -> tuple[Translator, Vocabulary, Vocabulary]:
    """Return the network of a snapshot, and its vocabularies."""
    try:
        about = json.loads(snapshot.with_name("model.json").read_text(encoding="utf-8"))
        model = MODELS[about["model"]](**about["sizes"])
        with np.load(snapshot) as content:
            inside = any(name.startswith(IN_SNAPSHOT) for name in content)
        chainer.serializers.load_npz(snapshot, model, path=IN_SNAPSHOT if inside else "")
    except OSError as error:
        raise SystemExit(f"error: {error}") from None
    source, target = map(Vocabulary, about["vocabularies"])
    return model, source, target


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
        xs = model.xp.asarray(pad([sentences[i] for i in wanted]))
        for i, row in zip(wanted, model.translate(xs, beam), strict=True):
            translations[i] = target.decode(row.tolist())
    return translations


if __name__ == "__main__":
    main()
