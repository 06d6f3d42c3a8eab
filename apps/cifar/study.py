"""The study of a search: which values to try next, and when to give up on a trial."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial, TrialState

# User attribute of a trial that repeats one whose job was killed: the number of that one.
REPEATS = "repeats"


def suggest(trial: optuna.Trial) -> dict[str, float | int]:
    """Return the values of a trial, by the names of options of `train.py`."""
    return {
        "lr": trial.suggest_float("lr", 0.02, 2, log=True),
        "weight_decay": trial.suggest_float("weight_decay", 1e-5, 1e-2, log=True),
        "dropout": trial.suggest_float("dropout", 0, 0.5),
        "unit": trial.suggest_int("unit", 4, 16, step=4),
    }


class Study:
    """Optuna's study in a file, and the trial that a group of ranks trains.

    Only rank 0 of each group has one; all of these share the file.

    Parameters
    ----------
    out : path
        An existing folder, with or without the file.
    n_trials : int
        Number of trials in the finished study, over all groups and jobs.
    seed : int
        Seed of the values to try.
    """

    def __init__(self, out: Path, n_trials: int, seed: int) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        out = out.resolve()  # the file's lock is a link to it
        self.n_trials, self.seed = n_trials, seed
        self._lock = JournalFileOpenLock(str(out / "ask"))
        self._study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(out / "study.journal"))),
            # The first epochs tell little: a high learning rate pays off only at the end.
            pruner=optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=3),
            study_name="cifar",
            direction="maximize",
            load_if_exists=True,
        )
        self._trial: optuna.Trial | None = None  # the one under way

    def check(self, settings: dict[str, Any]) -> None:
        """Raise ValueError if the study was started with other settings."""
        begun = self._study.user_attrs.get("settings", settings)
        changes = [
            f"{k}: {begun.get(k)}, now {v}" for k, v in settings.items() if begun.get(k) != v
        ]
        if changes:
            raise ValueError(
                f"the study was begun with other settings ({'; '.join(changes)}). Use those again "
                "to continue it, or another --out for a new one"
            )
        self._study.set_user_attr("settings", settings)

    def repeat_lost(self) -> None:
        """Schedule trials again if their job was killed. No other job may be running."""
        for trial in self._study.get_trials(states=[TrialState.RUNNING]):
            self._study.tell(trial.number, state=TrialState.FAIL)
            self._study.enqueue_trial(trial.params, {REPEATS: trial.number})

    def ask(self) -> tuple[int, dict[str, float | int]] | None:
        """Start a trial; return its number and values, or None if there are enough trials."""
        self._lock.acquire()  # or two groups would start the last trial
        try:
            begun = [trial for trial in self.trials() if trial.state != TrialState.WAITING]
            if len(begun) >= self.n_trials:
                return None
            # Depends only on the number of trials, so a study that continues after a crash tries
            # what it would have tried without.
            seed = np.random.SeedSequence([self.seed, len(begun)]).generate_state(1)
            self._study.sampler = optuna.samplers.TPESampler(n_startup_trials=5, seed=int(seed[0]))
            self._trial = self._study.ask()
            return self._trial.number, suggest(self._trial)
        finally:
            self._lock.release()

    def report(self, epoch: int, loss: float, accuracy: float) -> TrialState:
        """Record an epoch's validation; return how the trial ends if it ends now."""
        if not math.isfinite(loss):
            return TrialState.FAIL
        self._trial.report(accuracy, epoch)
        return TrialState.PRUNED if self._trial.should_prune() else TrialState.COMPLETE

    def tell(self, state: TrialState, accuracy: float) -> None:
        """End the trial; a complete one has its best accuracy as value."""
        self._study.tell(self._trial, accuracy if state == TrialState.COMPLETE else None, state)

    def trials(self) -> list[FrozenTrial]:
        """Return the trials by number, except those that are repeated."""
        trials = self._study.get_trials(deepcopy=False)
        repeated = {trial.user_attrs.get(REPEATS) for trial in trials}
        return [trial for trial in trials if trial.number not in repeated]
