"""Checkpoint all ranks together, in one file per rank."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import chainer
import numpy as np
from chainer.training.extension import Extension

from chainermn import spans
from chainermn.agreement import check_equal, run_together
from chainermn.arguments import check_communicator
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.extensions.npz_files import find_damage, is_usable_everywhere, write_npz

# The key that tells who wrote the file. Loading ignores keys that it does not know.
_LABEL = "chainermn_checkpoint"


def create_multi_node_checkpointer(
    name: str,
    comm: CommunicatorBase,
    cp_interval: int = 5,
    gc_interval: int = 5,
    path: str | os.PathLike[str] | None = None,
) -> MultiNodeCheckpointer:
    """Create an extension that lets an interrupted job resume.

    Each rank writes the state of its own trainer; `MultiNodeCheckpointer.maybe_load` loads the
    newest checkpoint that all ranks have. Use it for fault tolerance, not for keeping models: the
    files are deleted when training ends, and only a job with the same number of ranks can load
    them.

    Parameters
    ----------
    name : str
        Prefix of the files, ``{name}.{rank}.{iteration}``.
    comm : CommunicatorBase
    cp_interval : int
        Keep at least this many checkpoints.
    gc_interval : int
        Delete older ones once there are this many more.
    path : path, optional
        Directory of the files, shared by all hosts or local to each; the output directory of the
        trainer by default.

    Returns
    -------
    MultiNodeCheckpointer
        Call ``trainer.extend(checkpointer, trigger=(1000, 'iteration'))`` with it on every rank.

    Raises
    ------
    TypeError
        If ``comm`` is not a communicator.
    ValueError
        On every rank, if an argument is invalid or ``name`` differs between ranks.
    """
    where = "create_multi_node_checkpointer"
    check_communicator(f"{where}(name, comm)", comm, name)

    def check() -> None:
        if not isinstance(name, str) or not name or "/" in name or "\0" in name:
            raise ValueError(f"the name must be that of a file, got {name!r}")
        if cp_interval < 1 or gc_interval < 0:
            raise ValueError(
                "cp_interval must be at least 1 and gc_interval at least 0, "
                f"got {cp_interval} and {gc_interval}"
            )

    run_together(comm, where, check)
    check_equal(comm, f"name={name!r}", where)
    return MultiNodeCheckpointer(name, comm, cp_interval, gc_interval, path)


class MultiNodeCheckpointer(Extension):
    """Writes and loads checkpoints; see `create_multi_node_checkpointer`."""

    trigger = 1, "iteration"
    priority = -100  # as Chainer's snapshots: after everything that reports
    default_name = "_MultiNodeCheckpointer"  # the original's, which snapshots contain

    def __init__(
        self,
        name: str,
        comm: CommunicatorBase,
        cp_interval: int,
        gc_interval: int,
        path: str | os.PathLike[str] | None,
    ) -> None:
        self.name = name
        self.comm = comm
        self.cp_interval = cp_interval
        self.gc_interval = gc_interval
        self.path: Any = None if path is None else Path(path)
        self._seconds: list[float] = []

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        """Write a checkpoint of ``trainer``. Every rank must call it in the same iteration."""
        self.save(trainer, trainer.updater.iteration)

    @spans.spanned("checkpoint")
    def save(self, target: Any, iteration: int) -> None:
        """Write a checkpoint of an object that ``chainer.serializers`` can save. Collective.

        The checkpoint with the highest ``iteration`` is the newest.

        Raises
        ------
        OSError
            On ranks that cannot write their file; the others raise RuntimeError. Earlier
            checkpoints stay.
        """
        self._settle_path(target)

        def write() -> list[int]:
            start = time.perf_counter()
            arrays = dict(chainer.serializers.npz.serialize(target))
            arrays[_LABEL] = np.array([self.comm.size, self.comm.rank, iteration])
            self.path.mkdir(parents=True, exist_ok=True)
            write_npz(self._file(iteration), arrays)
            self._seconds.append(time.perf_counter() - start)
            return self._own_iterations()

        own = run_together(self.comm, "checkpoint", write)
        by_rank = self.comm.allgather_obj(own)
        is_due = max(map(len, by_rank)) > self.cp_interval + self.gc_interval
        kept = _in_all(by_rank)[-self.cp_interval :]
        if is_due and len(kept) == self.cp_interval:
            for iteration in own:
                if iteration < kept[0]:
                    self._file(iteration).unlink(missing_ok=True)

    def maybe_load(
        self,
        trainer: Any,
        optimizer: Any = None,
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        """Load the newest checkpoint that is complete on all ranks, if there is one. Collective.

        Parameters
        ----------
        trainer : chainer.training.Trainer
            The trainer, or another object that was given to `save`.
        optimizer : MultiNodeOptimizer, optional
            Ignored; scripts written for the original give it. The one in ``trainer`` is loaded.
        path : path, optional
            Directory of the files from now on.

        Raises
        ------
        RuntimeError
            On every rank, if there are checkpoints but none fits ``trainer``, part of which may
            have been loaded by then. A UserWarning names each file that is skipped: damaged, of
            another job, or not fitting.
        """
        self._settle_path(trainer, path)
        for leftover in self._files(f".{self.name}.{self.comm.rank}."):  # of a killed process
            leftover.unlink(missing_ok=True)
        failure = ""
        for iteration in reversed(_in_all(self.comm.allgather_obj(self._own_iterations()))):
            file = f"checkpoint {self._file(iteration)}"
            if not is_usable_everywhere(self.comm, file, self._find_fault(iteration)):
                continue
            try:
                chainer.serializers.load_npz(str(self._file(iteration)), trainer)
                fault = ""
            except Exception as error:
                fault = f"it does not fit: {type(error).__name__}: {error}"
            if is_usable_everywhere(self.comm, file, fault):
                return
            failure = f"the checkpoint of iteration {iteration} did not fit"
        if failure:
            raise RuntimeError(
                f"maybe_load: {failure}, nor did any older one; part of it may have been loaded. "
                f"Use another name than {self.name!r} or another path than {self.path} for "
                "another model"
            )

    def finalize(self) -> None:
        """Delete the checkpoints of this rank, unless an exception ends training."""
        if self.path is None or sys.exc_info()[0] is not None:
            return
        for iteration in self._own_iterations():
            self._file(iteration).unlink(missing_ok=True)

    def get_stats(self) -> str:
        """Tell how many seconds writing took on this rank."""
        if not self._seconds:
            return "No snapshot was taken"
        mean, least, most = np.mean(self._seconds), min(self._seconds), max(self._seconds)
        return f"Snapshot duration stats (sec): avg={mean:f}, min={least:f}, max={most:f}"

    def _settle_path(self, target: Any, path: str | os.PathLike[str] | None = None) -> None:
        if path is not None:
            self.path = Path(path)
        if self.path is None:
            if not hasattr(target, "out"):
                raise ValueError(
                    f"{type(target)} has no output directory, as a trainer has: give a path to "
                    "create_multi_node_checkpointer"
                )
            self.path = Path(target.out)

    def _file(self, iteration: int) -> Path:
        return Path(self.path, f"{self.name}.{self.comm.rank}.{iteration}")

    def _files(self, prefix: str) -> list[Path]:
        """Return the files whose names start with ``prefix``."""
        if not self.path.is_dir():
            return []
        return [file for file in self.path.iterdir() if file.name.startswith(prefix)]

    def _own_iterations(self) -> list[int]:
        """Return the iterations for which this rank has a file."""
        prefix = f"{self.name}.{self.comm.rank}."
        endings = [file.name.removeprefix(prefix) for file in self._files(prefix)]
        return sorted(int(ending) for ending in endings if ending.isascii() and ending.isdigit())

    def _find_fault(self, iteration: int) -> str:
        file = self._file(iteration)
        if damage := find_damage(file):
            return damage
        try:
            with np.load(file) as arrays:
                label = arrays[_LABEL].tolist()
        except (KeyError, ValueError):
            return "it is no checkpoint"
        expected = [self.comm.size, self.comm.rank, iteration]
        if label != expected:
            parts = "number of ranks, rank, iteration"
            return f"its label is {label}, but {expected} was expected: {parts}"
        return ""


def _in_all(by_rank: list[list[int]]) -> list[int]:
    return sorted(set.intersection(*map(set, by_rank)))
