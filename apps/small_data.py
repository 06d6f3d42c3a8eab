"""A few examples for each app, for tests that start its script."""

import functools
from pathlib import Path

import numpy as np

from chainermn.testing.modules import import_modules

APPS = Path(__file__).resolve().parent


def write(app: str, folder: Path) -> None:
    """Write a few examples, or what an app keeps, if its own would take long."""
    if app == "imagenet":
        import_modules(APPS / app, ["generated"]).generated.create(folder / "drawn", 40, 10)
        (folder / "drawn/mean.json").unlink()
        np.save(folder / "mean.npy", np.full((3, 256, 256), 127, np.float32))
    elif app == "seq2seq":
        paths = folder / "dates.source", folder / "dates.target"
        import_modules(APPS / app, ["generated"]).generated.write(*paths, 203, 1)
    elif app == "dcgan":  # whose features take longer than a short training
        modules = import_modules(APPS / app, ["data", "evaluation"])
        images, _ = modules.data.load("digits", None, 8)
        features = modules.evaluation.train_features
        modules.evaluation.train_features = functools.partial(features, steps=2)
        modules.evaluation.load_features(folder / "result", images)
