"""The accuracy of the apps with all that sends less, beside what another seed changes."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import report
from benchmarks.figures import Group, Measured, load
from benchmarks.harness import ONE_THREAD, REPOSITORY, Place, Settings, places
from benchmarks.slow import COMPRESSIONS

TITLE = "Accuracy of the apps"
AS_IT_IS = "exact means"
_LATER = 100  # steps, a tenth of those of the shortest training that is more than a toy
SETTINGS: dict[str, dict[str, Any]] = {
    AS_IT_IS: {},
    "bfloat16": {"dtype": "bfloat16"},
    "PowerSGD, rank 2": {"compression": COMPRESSIONS["PowerSGD, rank 2"]},
    f"PowerSGD, rank 4, from step {_LATER}": {
        "compression": {**COMPRESSIONS["PowerSGD, rank 4"], "start_iteration": _LATER}
    },
    "TopK, 1 %": {"compression": COMPRESSIONS["TopK, 1 %"]},
    "Quantization, 8 bits": {"compression": COMPRESSIONS["Quantization, 8 bits"]},
    "LocalSGD, period 8": {"local": {"period": 8}},
    f"LocalSGD, period 8, from step {_LATER}": {"local": {"period": 8, "start_iteration": _LATER}},
}
SEEDS = range(3)
ONE_HOST, TWO_HOSTS = {"2 ranks, one host": (2,)}, {"2 ranks, two hosts": (1, 1)}


class App(NamedTuple):
    """What is measured of an app, and arguments beside those that all have."""

    measure: str  # its name in the log
    arguments: tuple[str, ...] = ()


APPS = {
    "mnist": App("accuracy"),
    "imagenet": App("accuracy"),
    "seq2seq": App("exact", ("--cache", "corpus")),
}


def measure(settings: Settings) -> Iterator[Group | str]:
    """Yield a group for each app, and what could not be measured and why."""
    for name in APPS:
        wanted = [s for s in SETTINGS if settings.wants(f"{name}: {s}")]
        if wanted:
            yield from measure_app(name, wanted, settings)


def measure_app(name: str, wanted: Sequence[str], settings: Settings) -> Iterator[Group | str]:
    """Train an app with some settings and each seed; keep what was measured with the others.

    A training does not depend on when it is measured.
    """
    title, key = f"apps/{name}, {APPS[name].measure}", {"app": name}
    saved = [group for content in load("convergence").values() for group in content["groups"]]
    before = next((group for group in saved if group.key == key), Group("", {}, [], ""))
    rows = {setting: before.row(setting) for setting in SETTINGS}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        for setting in wanted:
            for place in places_for(SETTINGS[setting]):
                if isinstance(place, str):
                    yield f"{title}: {setting}: {place}"
                    continue
                row = rows[setting] = Measured(setting)
                for seed in SEEDS[:1] if settings.quick else SEEDS:
                    settings.tell(f"{name}: {setting}, seed {seed}")
                    start = time.monotonic()
                    curve = train(place, name, SETTINGS[setting], seed, folder, settings.quick)
                    row.curves.append(curve)
                    row.seconds.append(time.monotonic() - start)
    yield Group(title, key, [row for row in rows.values() if row.curves], AS_IT_IS)


def places_for(setting: dict[str, Any]) -> Iterator[Place | str]:
    """Yield where to train: on one host nothing is rounded, and all else is the same there."""
    # A link so fast that only the training takes time.
    return places(TWO_HOSTS if "dtype" in setting else ONE_HOST, rate="10gbit")


def train(
    place: Place, name: str, setting: dict[str, Any], seed: int, folder: str, quick: bool
) -> list[float]:
    """Return what is measured after each epoch."""
    app = APPS[name]
    out = tempfile.mkdtemp(dir=folder)
    arguments = ["--seed", str(seed), "--out", out, *app.arguments]
    arguments += ["--epoch", "1"] if quick else []
    script = REPOSITORY / "apps" / name / "train.py"
    # Emulated hosts start programs in the folder of this process.
    in_folder = ["env", f"--chdir={folder}"]
    program = [sys.executable, "-m", "benchmarks.ranks.with_settings", json.dumps(setting)]
    environment = {**place.environment(), "PYTHONPATH": str(REPOSITORY)}
    ended = subprocess.run(
        place.command(
            [*in_folder, *program, str(script), *arguments], ["PYTHONPATH", *ONE_THREAD]
        ),
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if ended.returncode != 0:
        raise RuntimeError(f"{name}, {setting}: {ended.stderr[-3000:]}")
    log = json.loads(Path(out, "log").read_text(encoding="utf-8"))
    return [entry[f"validation/main/{app.measure}"] for entry in log]


def write(part: str, title: str) -> None:
    """Write tables of the last values, and curves in one picture."""
    report.write(part, title, table, draw)


def table(group: Group) -> list[str]:
    """Return the last value of each curve, in per cent, and how far means are from each other."""
    exact = group.row(AS_IT_IS).last
    heads = ["", *(f"seed {seed}" for seed in range(len(exact))), "mean", "difference"]
    lines = report.heads_of(heads)
    for row in group.rows:
        values = row.last
        mean = statistics.fmean(values)
        difference = mean - statistics.fmean(exact)
        cells = [f"{100 * value:.2f}" for value in (*values, mean)]
        lines.append(report.line([row.name, *cells, f"{100 * difference:+.2f}"]))
    spread = 100 * (max(exact) - min(exact))
    return [*lines, "", f"- With {AS_IT_IS} the seed changes it by {spread:.2f}"]


def draw(part: str, path: Path) -> None:
    """Draw the mean of the seeds after each epoch, and the least and the greatest."""
    from matplotlib import pyplot

    groups = [group for content in load(part).values() for group in content["groups"]]
    figure, axes = pyplot.subplots(1, len(groups), figsize=(5 * len(groups), 4), squeeze=False)
    for axis, group in zip(axes.flat, groups, strict=True):
        for row in group.rows:
            by_epoch = list(zip(*row.curves, strict=False))
            epochs = range(1, len(by_epoch) + 1)
            (drawn,) = axis.plot(epochs, [*map(statistics.fmean, by_epoch)], label=row.name)
            least, greatest = [*map(min, by_epoch)], [*map(max, by_epoch)]
            axis.fill_between(epochs, least, greatest, color=drawn.get_color(), alpha=0.15)
        axis.set_title(group.title, fontsize=9)
        axis.set_xlabel("epoch", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
    axes.flat[0].legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
