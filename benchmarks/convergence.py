"""Accuracy of the apps with everything that sends less, compared with other seeds."""

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

from matplotlib.ticker import MaxNLocator

from benchmarks import plots, report
from benchmarks.figures import Group, Measured, load
from benchmarks.harness import ONE_THREAD, REPOSITORY, Place, Settings, places
from benchmarks.slow import COMPRESSIONS

AS_IT_IS = "exact means"
_LATER = 100  # steps, a tenth of the shortest training that is more than a toy
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
    """What to measure of an app, and its own arguments."""

    measure: str  # name in the log
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
    """Train an app with some settings and each seed, and keep earlier results of the others.

    Accuracy does not depend on when it is measured.
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
    """Yield where to train. Rounding happens only between hosts, everything else on one, too."""
    # On this fast link, only the training takes time.
    return places(TWO_HOSTS if "dtype" in setting else ONE_HOST, rate="10gbit")


def train(
    place: Place, name: str, setting: dict[str, Any], seed: int, folder: str, quick: bool
) -> list[float]:
    """Return the accuracy after each epoch."""
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


def write(part: str) -> None:
    """Write the page, with tables of the final accuracy."""
    report.write(part, table)


def table(group: Group) -> list[str]:
    """Return the final accuracy for each seed in per cent, the mean, and its difference."""
    exact = group.row(AS_IT_IS).last
    heads = ["setting", *(f"seed {seed}" for seed in range(len(exact))), "mean", "difference"]
    lines = report.heads_of(heads)
    for row in group.rows:
        values = row.last
        mean = statistics.fmean(values)
        difference = mean - statistics.fmean(exact)
        cells = [f"{100 * value:.2f}" for value in (*values, mean)]
        lines.append(report.line([row.name, *cells, f"{100 * difference:+.2f}"]))
    spread = 100 * (max(exact) - min(exact))
    return [*lines, "", f"- With {AS_IT_IS}, the seed changes the accuracy by up to {spread:.2f}."]


def draw() -> None:
    """Draw the final accuracy for each seed, beside the range with exact means."""
    labels = {name: _short(name) for name in SETTINGS}
    for content in load("convergence").values():
        groups = content["groups"]
        heights = [plots.BAR * len(group.rows) for group in groups]
        caption = (
            "final accuracy, %; more is better\n"
            "a dot is a seed; shaded: the seeds with exact means\n"
            f"*: compressed or local from step {_LATER}"
        )
        with plots.settings():
            figure, axes = plots.stack(heights, labels.values(), caption, ticks=True)
            for axis, group in zip(axes, groups, strict=True):
                _draw_dots(axis, group, labels)
                plots.title_of(axis, group.title)
            plots.save(figure, "convergence")


def _short(setting: str) -> str:
    name, _, later = setting.partition(", from step")
    return name.replace(",", "").replace("exact means", "exact means (float32)") + " *" * bool(
        later
    )


def _draw_dots(axis: Any, group: Group, labels: dict[str, str]) -> None:
    exact = [100 * value for value in group.row(AS_IT_IS).last]
    axis.axvspan(min(exact), max(exact), color=plots.INK, alpha=0.15, linewidth=0)
    for y, row in enumerate(group.rows):
        found = [100 * value for value in row.last]
        axis.plot(found, [y] * len(found), "o", color=plots.OURS, markersize=4, clip_on=False)
    axis.set_yticks(range(len(group.rows)), [labels[row.name] for row in group.rows])
    axis.set_ylim(len(group.rows) - 0.5, -0.5)
    axis.grid(axis="x", color=plots.INK, alpha=plots.FAINT, linewidth=0.5)
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
