#!/usr/bin/env python3
"""Tell what images show, by a network that train.py has trained."""

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import chainer
import numpy as np

import images
from data import CENTRE, ToBatch
from models import ARCHITECTURES


def main() -> int:
    args = parse_arguments()
    about = json.loads(args.model.with_suffix(".json").read_text())
    network = ARCHITECTURES[about["arch"]](len(about["classes"]))
    chainer.serializers.load_npz(args.model, network)
    to_batch = ToBatch(about["mean"], about["deviation"])

    failures = 0
    for path in args.images:
        try:
            image = images.read_image(
                path, about["insize"], partial(images.centre_box, share=CENTRE)
            )
        except Exception as error:  # Pillow's decoders raise what they like
            print(f"{path}: {type(error).__name__}: {error}", file=sys.stderr)
            failures += 1
            continue
        x, _ = to_batch([(image, np.int32(0))])
        with chainer.using_config("train", False), chainer.no_backprop_mode():
            scores = chainer.functions.softmax(network(x)).array[0]
        print(path)
        for label in np.argsort(-scores)[:5]:
            print(f"  {scores[label]:6.1%}  {about['classes'][label]}")
    return min(failures, 1)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("images", metavar="IMAGE", nargs="+", type=Path)
    model = Path("result/model.npz")
    add("--model", "-m", type=Path, default=model, metavar="FILE", help="default: %(default)s")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
