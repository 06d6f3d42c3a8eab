"""Read mutants of a snapshot as a job would, in little memory, and report what became of them.

``python read_strange_files.py FOLDER FIRST NUMBER`` prints JSON: how many mutants of each kind
were loaded, found damaged, refused or did not fit, and how much memory that took.
"""

import collections
import json
import random
import resource
import sys
import time
from pathlib import Path

import chainer
import numpy as np
import strange_files
from chainer.training import StandardUpdater, Trainer, extensions

from chainer_compat.npz import UnsafeFileError
from chainermn.extensions.npz_files import find_damage
from chainermn.extensions.snapshot_contents import difference, digests_of_model, load

MEGABYTES = 128  # of address space, on top of what is in use when the first mutant is read
UNKNOWN_SHAPE = "updater/optimizer:main/predictor/W/m"


# Otherwise, a trainer can be saved only after it has begun to run.
Trainer.elapsed_time = 0.0


def make_trainer(out: Path) -> Trainer:
    np.random.seed(0)
    model = chainer.links.Classifier(chainer.links.Linear(None, 2))
    optimizer = chainer.optimizers.Adam().setup(model)
    data = chainer.datasets.TupleDataset(np.ones((8, 3), np.float32), np.zeros(8, np.int32))
    updater = StandardUpdater(chainer.iterators.SerialIterator(data, 2), optimizer)
    trainer = Trainer(updater, (1, "epoch"), out=str(out))
    trainer.extend(extensions.LogReport(trigger=(2, "iteration")))
    trainer.extend(extensions.ExponentialShift("alpha", 0.9), trigger=(1, "epoch"))
    trigger = chainer.training.triggers.MinValueTrigger("main/loss", (9, "epoch"))
    trainer.extend(lambda _: None, name="best", trigger=trigger)  # its value stays None
    return trainer


def state_of(trainer: Trainer) -> dict[str, str]:
    state = chainer.serializers.npz.serialize(trainer)
    return {key: repr(np.asarray(value).tolist()) for key, value in state.items()}


def read(path: Path, content: bytes, out: Path) -> tuple[str, str, Trainer]:
    """Resume from a file as a job does; return what happened."""
    path.write_bytes(content)
    trainer = make_trainer(out)
    try:
        if damage := find_damage(path):
            return "damaged", damage, trainer
        difference(path, "{}")
        digests_of_model(path, trainer)
        load(path, content, trainer)
    except UnsafeFileError as error:
        return "unsafe", str(error), trainer
    except OSError as error:
        return "damaged", str(error), trainer
    except ValueError as error:
        assert str(error).startswith(f"{path} does not fit"), error
        return "does not fit", str(error), trainer
    return "loaded", "", trainer


def main(out: Path, first: int, number: int) -> None:
    trainer = make_trainer(out)
    trainer.run()
    path, trap = out / "mutant", out / "trapped"
    originals = []
    for compression in (True, False):
        chainer.serializers.save_npz(str(path), trainer, compression)
        originals.append(path.read_bytes())
        what, why, loaded = read(path, originals[-1], out)
        assert what == "loaded", why
    state = state_of(loaded)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEGABYTES * 2**20, hard))
    became: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    slowest = 0.0
    for seed in range(first, first + number):
        draw = random.Random(seed)
        mutate = strange_files.MUTATIONS[seed % len(strange_files.MUTATIONS)]
        mutant = mutate(draw, draw.choice(originals), trap)
        start = time.perf_counter()
        try:
            what, _, loaded = read(path, mutant, out)
        except Exception as error:
            error.add_note(f"seed {seed}: {mutate.__name__}")
            raise
        slowest = max(slowest, time.perf_counter() - start)
        assert not trap.exists(), f"seed {seed}: {mutate.__name__} has run code"
        if what == "loaded" and mutate in strange_files.ACCIDENTS:
            assert state_of(loaded) == state, f"seed {seed}: {mutate.__name__} has other values"
        became[mutate.__name__][what] += 1
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    # The job cannot know this array's shape, so it reads as much as there is.
    bomb = strange_files.with_bomb(originals[0], UNKNOWN_SHAPE, 2 * MEGABYTES)
    what, why, _ = read(path, bomb, out)
    assert what == "damaged", what
    result = {
        "became": became,
        "slowest": slowest,
        "megabytes": (after - before) // 1024,
        "bomb": [len(bomb), why],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
