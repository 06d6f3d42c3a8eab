#!/usr/bin/env python3
"""Draw images with a trained generator."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from chainermn.files import exit_on_error
from model import draw_latents, generate, load_generator
from reports import save_grid


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    with exit_on_error():
        generator = load_generator(args.weights)
    np.random.seed(args.seed)
    images = generate(generator, draw_latents(args.number))
    with exit_on_error():
        save_grid(images, args.picture)
    print(f"picture: {args.picture.resolve()}")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    best = Path("result/best.npz")
    add("weights", metavar="FILE", nargs="?", type=Path, default=best, help="default: %(default)s")
    add("--number", "-n", type=int, default=80, help="number of images; default: %(default)s")
    add("--seed", type=int, default=0, help="each seed draws different images")
    picture = Path("generated.png")
    add("--picture", metavar="FILE", type=Path, default=picture, help="default: %(default)s")
    args = parser.parse_args(argv)
    if args.number < 1 or args.seed < 0:
        parser.error("--number must be at least 1, and --seed at least 0")
    return args


if __name__ == "__main__":
    main()
