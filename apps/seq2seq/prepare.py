#!/usr/bin/env python3
"""Make training files: translations of programs' messages, and models of subwords."""

import argparse
import json
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from catalogs import Messages, Pair, find_catalogs
from chainermn.datasets.names import shown
from chainermn.datasets.texts import read_lines
from chainermn.progress import Progress
from subwords import train_subwords


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    try:
        args.act(args)
    except (ImportError, OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="gettext|subwords")

    about = "pairs of English and another language from catalogs (.po, .mo)"
    command = commands.add_parser("gettext", help=about, description=f"Make {about}.")
    add = command.add_argument
    found = "catalogs, folders with catalogs, or Debian packages (.deb)"
    add("paths", metavar="PATH", nargs="+", type=Path, help=found)
    add("--language", "-l", required=True, help="language of the translations, such as de")
    out = "folder for train.en and so on"
    add("--out", "-o", metavar="DIR", type=Path, required=True, help=out)
    validation = "largest number of pairs; default: %(default)s"
    add("--validation", type=int, default=1000, help=validation)
    add("--test", type=int, default=2000, help="largest number of pairs; default: %(default)s")
    add("--max-characters", type=int, default=300, help="skip longer messages")
    add("--seed", type=int, default=0, help="seed of the choice of packages")
    command.set_defaults(act=make_from_catalogs)

    about = "a model of subwords, for train.py --subwords"
    command = commands.add_parser("subwords", help=about, description=f"Train {about}.")
    add = command.add_argument
    add("files", metavar="FILE", nargs="+", type=Path, help="text in one language or both")
    add("--vocabulary-size", type=int, default=8000, help="largest size; default: %(default)s")
    add("--kind", choices=["unigram", "bpe"], default="unigram", help="default: %(default)s")
    out = "output, such as subwords.model"
    add("--out", "-o", metavar="FILE", type=Path, required=True, help=out)
    command.set_defaults(act=make_subwords)
    return parser.parse_args(argv)


def make_from_catalogs(args: argparse.Namespace) -> None:
    messages = Messages()
    with find_catalogs(args.paths, args.language) as catalogs:
        bar = Progress(len(catalogs), "catalogs")
        for path, package in catalogs:
            messages.read(path, package, args.max_characters)
            bar.step()
    if not any(messages.packages.values()):
        raise ValueError(f"no messages in {args.language} found in {len(args.paths)} paths")
    parts, packages = split(messages.packages, args.validation, args.test, args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, pairs in parts.items():
        for language, lines in zip(("en", args.language), zip(*pairs, strict=True), strict=True):
            text = "".join(f"{line}\n" for line in lines)
            (args.out / f"{name}.{language}").write_text(text, encoding="utf-8")
    counts = {
        "pairs": {name: len(pairs) for name, pairs in parts.items()},
        "packages": packages,
        "catalogs": messages.catalogs,
        "skipped": dict(messages.skipped),
        "messages": {name: len(pairs) for name, pairs in sorted(messages.packages.items())},
    }
    (args.out / "counts.json").write_text(json.dumps(counts, indent=1) + "\n", encoding="utf-8")
    for name, pairs in parts.items():
        print(f"{name}: {len(pairs)} pairs of {len(packages[name])} packages")
    reasons = ", ".join(f"{n} {reason}" for reason, n in messages.skipped.most_common())
    print(f"skipped messages: {reasons or 'none'}")


def split(
    packages: dict[str, list[Pair]], n_validation: int, n_test: int, seed: int
) -> tuple[dict[str, list[Pair]], dict[str, list[str]]]:
    """Divide pairs by package, so that no test sentence occurs in the training.

    Whole packages are taken, in random order, as long as they fit. A message that occurs in
    several packages, ignoring case and punctuation, is used only for training.

    Parameters
    ----------
    packages : dict of list of tuple
        The pairs of each package.
    n_validation, n_test : int
        Largest number of pairs.
    seed : int

    Returns
    -------
    parts : dict of list of tuple
        Pairs for ``train``, ``valid`` and ``test``; no pair occurs twice.
    names : dict of list of str
        The packages of each part.

    Raises
    ------
    ValueError
        If a part would be empty.
    """
    owners = defaultdict(set)
    for package, pairs in packages.items():
        for source, _ in pairs:
            owners[_essence(source)].add(package)
    own = {
        package: [pair for pair in pairs if len(owners[_essence(pair[0])]) == 1]
        for package, pairs in packages.items()
    }
    order = sorted(package for package, pairs in own.items() if pairs)
    random.Random(seed).shuffle(order)  # noqa: S311  # a split of data needs no secrecy
    names: dict[str, list[str]] = {"train": [], "valid": [], "test": []}
    parts: dict[str, list[Pair]] = {"train": [], "valid": [], "test": []}
    for package in order:
        for name, limit in (("test", n_test), ("valid", n_validation), ("train", None)):
            if limit is None or len(parts[name]) + len(own[package]) <= limit:
                names[name].append(package)
                parts[name] += own[package]
                break
    shared = (pair for pairs in packages.values() for pair in pairs)
    parts["train"] += [pair for pair in shared if len(owners[_essence(pair[0])]) > 1]
    parts = {name: list(dict.fromkeys(pairs)) for name, pairs in parts.items()}
    if empty := [name for name, pairs in parts.items() if not pairs]:
        raise ValueError(
            f"there is nothing for {' and '.join(empty)}: {len(packages)} packages cannot be "
            f"divided so that at most {n_validation} pairs validate and {n_test} test. Give more "
            "packages, or other numbers for --validation and --test"
        )
    return parts, {name: sorted(found) for name, found in names.items()}


def _essence(message: str) -> str:
    """Return a message without case and punctuation."""
    return " ".join(re.findall(r"\w+", message.casefold()))


def make_subwords(args: argparse.Namespace) -> None:
    def lines() -> Iterator[str]:
        for path in args.files:
            line = None
            for line in filter(None, read_lines(path)):
                yield line
            if line is None:
                raise ValueError(f"{shown(path)}: expected lines of text, got none")

    model = train_subwords(lines(), args.kind, args.vocabulary_size)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_bytes(model)
    print(f"written: {shown(args.out.resolve())}")


if __name__ == "__main__":
    main()
