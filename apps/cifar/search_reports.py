"""Output of a search, on rank 0."""

import csv
from pathlib import Path

import numpy as np
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, TrialState

from study import Study

NAMES = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}
COLORS = {"complete": "tab:blue", "pruned": "tab:orange", "failed": "tab:red"}


def accuracy_of(trial: FrozenTrial) -> float:
    """Return the best validation accuracy of a trial; NaN if there is none."""
    return max(trial.intermediate_values.values(), default=float("nan"))


def finished(study: Study) -> list[FrozenTrial]:
    """Return the finished trials, in the order of their ends."""
    trials = [trial for trial in study.trials() if trial.state in NAMES]
    return sorted(trials, key=lambda trial: trial.datetime_complete)


class Table:
    """Prints a row per finished trial.

    Parameters
    ----------
    study : Study
    """

    def __init__(self, study: Study) -> None:
        self.study = study
        self._n_printed = 0

    def print_new_rows(self) -> None:
        """Print the trials that have finished since the last call."""
        for trial in finished(self.study)[self._n_printed :]:
            values = {name: f"{value:.4g}" for name, value in trial.params.items()}
            row = {"trial": trial.number, **values, "epochs": len(trial.intermediate_values)}
            row["accuracy"] = f"{accuracy_of(trial):.2%}"
            row["seconds"] = f"{trial.duration.total_seconds():.1f}"
            row["state"] = NAMES[trial.state]
            if self._n_printed == 0:
                print(*(f"{name:<12}" for name in row), flush=True)
            print(*(f"{value!s:<12}" for value in row.values()), flush=True)
            self._n_printed += 1


def print_summary(study: Study, out: Path) -> None:
    """Write and draw the trials, and print which is best and where the files are."""
    trials = finished(study)
    write(trials, out / "trials.csv")
    draw(trials, out / "trials.png")
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    if complete:
        best = max(complete, key=accuracy_of)
        options = " ".join(f"--{name} {value:.4g}" for name, value in best.params.items())
        print(f"the best: trial {best.number}, {accuracy_of(best):.2%} of the validation images")
        print("to train with its values: train.py", options.replace("_", "-"))
    else:
        print("no trial is complete")
    print(f"table, picture and study: {out.resolve()}/{{trials.csv,trials.png,study.journal}}")


def write(trials: list[FrozenTrial], path: Path) -> None:
    """Write a table of the trials."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        names = list(trials[0].params)
        writer.writerow(["trial", "state", "epochs", "accuracy", *names])
        for trial in trials:
            how = NAMES[trial.state], len(trial.intermediate_values), accuracy_of(trial)
            writer.writerow([trial.number, *how, *(trial.params[name] for name in names)])


def draw(trials: list[FrozenTrial], path: Path) -> None:
    """Draw the accuracies in the order of the trials, and over each hyperparameter."""
    from matplotlib.figure import Figure

    names = list(trials[0].params)
    last_may_be_empty = [*names, "."]
    rows = [["trial", "trial"], *(last_may_be_empty[i : i + 2] for i in range(0, len(names), 2))]
    # Narrow, so that the labels are readable on a phone.
    figure = Figure(figsize=(5.4, 2.2 * len(rows)), layout="constrained", dpi=160)
    panels = figure.subplot_mosaic(rows, sharey=True)
    for name, axes in panels.items():
        for state, color in COLORS.items():
            shown = [trial for trial in trials if NAMES[trial.state] == state]
            if not shown:
                continue
            places = [trial.number if name == "trial" else trial.params[name] for trial in shown]
            # A failed trial has no accuracy and is drawn at the bottom.
            heights = np.nan_to_num([accuracy_of(trial) for trial in shown])
            axes.scatter(places, heights, color=color, label=state, s=25)
        if name != "trial" and is_logarithmic(trials[0].distributions[name]):
            axes.set_xscale("log")
        axes.set_xlabel(name)
        axes.grid(alpha=0.3)
    panels["trial"].legend()
    figure.supylabel("validation accuracy")
    figure.savefig(path)


def is_logarithmic(distribution: BaseDistribution) -> bool:
    """Tell whether a hyperparameter is searched on a logarithmic scale."""
    return getattr(distribution, "log", False)
