"""Write and load one snapshot for all ranks whose trainers are replicas."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import chainer
import numpy as np
from chainer.training.extension import Extension

from chainermn import spans
from chainermn.agreement import check_equal, run_together
from chainermn.arguments import check_communicator, check_has
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.extensions import random_states
from chainermn.extensions.npz_files import find_damage, is_usable_everywhere
from chainermn.extensions.snapshot_contents import LABEL, difference, label_of, load
from chainermn.optimizers.settling import optimizers_of, settle

_WHERE = "multi_node_snapshot"


def multi_node_snapshot(
    comm: CommunicatorBase,
    snapshot: Extension,
    replica_sets: Sequence[int | Iterable[int]],
    settings: Mapping[str, Any] | None = None,
) -> MultiNodeSnapshot:
    """Create an extension that writes one snapshot for all ranks, and resumes from it.

    Parameters
    ----------
    comm : CommunicatorBase
        Communicator of the ranks that train.
    snapshot : extension
        Snapshot of Chainer, from ``chainer.training.extensions.snapshot`` or ``snapshot_object``.
        The number of the rank that writes is appended to its ``filename``, as ``.{rank}``.
    replica_sets : sequence of (int or iterable of int)
        Disjoint sets of ranks whose trainers are replicas of each other. The lowest rank of a set
        writes for the whole set. Ranks that are in none of them form one more set, so ``[]``
        means one snapshot for all ranks. Use ``[0]`` if other ranks have extensions that rank 0
        lacks.
    settings : mapping, optional
        Settings of the run that change its result, such as ``vars(args)``: strings, numbers and
        other values that JSON supports. They label the snapshots, and a run resumes by itself only
        with the same settings. The snapshots then also hold the state of NumPy's global random
        generator of every rank, for the same number of ranks.

    Returns
    -------
    MultiNodeSnapshot
        Extension for the trainer of every rank.

    Raises
    ------
    ValueError, TypeError
        On every rank, if ``snapshot`` is not a snapshot, if ``replica_sets`` or ``settings`` are
        invalid or differ between ranks, or if ``settings`` are given for a snapshot of an object
        other than the trainer.

    Notes
    -----
    With ``autoload=True``, or in `MultiNodeSnapshot.resume`, all sets load the newest snapshot
    that every set has, and skip damaged files. A file that could run code is not skipped; every
    rank raises.

    You can resume with a different number of ranks if the same ranks write. The shuffled order of
    an iterator fits only the number of examples that a rank had. If this number changes, the
    iterator resumes at the same fraction of the epoch, in its own order. With
    `create_distributed_sampler`, or another order sampler with a method ``order(epoch)``, each
    rank resumes with its part of the same epoch, for any number of ranks. Snapshots, except those
    of ``snapshot_on_error``, also hold the gradients that ranks still have to send; only the same
    number of ranks loads these.

    All ranks wait for the one that writes. Writing is much faster without compression:
    ``extensions.snapshot(savefun=functools.partial(save_npz, compression=False))``.

    Examples
    --------
    >>> snapshot = training.extensions.snapshot(filename="snapshot_{.updater.epoch}")
    >>> snapshot = chainermn.extensions.multi_node_snapshot(comm, snapshot, [])
    >>> trainer.extend(snapshot, trigger=(1, "epoch"))
    >>> trainer.run()
    >>> import os
    >>> sorted(os.listdir("result"))
    ['snapshot_1.0', 'snapshot_2.0']
    """
    check_communicator(f"{_WHERE}(comm, snapshot, replica_sets)", comm, snapshot)

    def check() -> tuple[list[set[int]], str | None]:
        expected = "a snapshot, as chainer.training.extensions.snapshot returns"
        check_has(_WHERE, snapshot, expected, "filename")
        if settings is not None and snapshot._target is not None:
            raise ValueError("settings are for snapshots of the whole trainer")
        return parse_replica_sets(replica_sets, comm.size), label_of(settings)

    sets, label = run_together(comm, _WHERE, check)
    check_equal(comm, f"replica_sets={[sorted(ranks) for ranks in sets]}", _WHERE)
    check_equal(comm, f"settings={label}", _WHERE)
    return MultiNodeSnapshot(comm, snapshot, sets, label)


def parse_replica_sets(replica_sets: Sequence[int | Iterable[int]], size: int) -> list[set[int]]:
    """Return disjoint sets that contain all ranks; see `multi_node_snapshot`."""
    sets = [{entry} if isinstance(entry, int) else set(entry) for entry in replica_sets]
    remaining = set(range(size))
    for ranks in sets:
        if not ranks or not ranks <= remaining:
            raise ValueError(
                f"replica_sets must be disjoint sets of ranks from 0 to {size - 1}, got {sets}"
            )
        remaining -= ranks
    return [*sets, remaining] if remaining else sets


class MultiNodeSnapshot(Extension):
    """The extension that `multi_node_snapshot` returns.

    Attributes
    ----------
    replica_set : set of int
        Ranks that share snapshots with this rank.
    master : int
        Rank of this set that writes.

    Examples
    --------
    Resume from the newest snapshot, if there is one:

    >>> snapshot = training.extensions.snapshot()
    >>> snapshot = chainermn.extensions.multi_node_snapshot(comm, snapshot, [])
    >>> trainer.extend(snapshot)
    >>> snapshot.resume(trainer)
    False
    >>> trainer.run()
    >>> longer = training.Trainer(updater, (3, "epoch"), out="result")
    >>> is_resumed = snapshot.resume(longer)
    resuming after iteration 4, epoch 2, from result/snapshot_iter_4.0
    """

    trigger = 1, "epoch"
    priority = -100  # as Chainer's snapshots: after everything that reports
    default_name = "_MultiNodeSnapshot"  # the original's, which snapshots contain

    def __init__(
        self,
        comm: CommunicatorBase,
        snapshot: Extension,
        replica_sets: list[set[int]],
        label: str | None,
    ) -> None:
        self.comm = comm
        self.snapshot = snapshot
        self._label = label
        self._random_states: list[Any] = []
        self.replica_set = next(ranks for ranks in replica_sets if comm.rank in ranks)
        self.master = min(self.replica_set)
        self._plain_filename = snapshot.filename
        if callable(snapshot.filename):
            snapshot.filename = lambda trainer: f"{self._plain_filename(trainer)}.{comm.rank}"
        else:
            snapshot.filename = f"{snapshot.filename}.{comm.rank}"

    @property
    def is_master(self) -> bool:
        """Whether this rank writes."""
        return self.comm.rank == self.master

    def initialize(self, trainer: chainer.training.Trainer) -> None:
        """Load the newest snapshot, if ``autoload`` is on. This is then collective.

        Raises on every rank if the snapshot does not fit the trainer of any rank, or holds
        pickles other than None, numbers and strings, which could run code. Warns about each
        damaged snapshot that it skips. Rank 0 warns if nothing is loaded because the ranks that
        write now have no snapshot in common.
        """
        autoload, self.snapshot.autoload = self.snapshot.autoload, False
        if self.is_master:
            self.snapshot.initialize(trainer)
        self.snapshot.autoload = autoload
        if autoload and (name := self._newest_common_name(Path(trainer.out))) is not None:
            self._load(Path(trainer.out, f"{name}.{self.master}"), trainer)

    def on_error(self, trainer: chainer.training.Trainer, exc: Exception, tb: Any) -> None:
        """Write a snapshot, if ``snapshot_on_error`` is on."""
        if self.is_master:
            self.snapshot.on_error(trainer, exc, tb)

    @spans.spanned("checkpoint")
    def __call__(self, trainer: chainer.training.Trainer) -> None:
        """Write a snapshot. Every rank of the set must call it."""
        target = self._target(trainer)
        # Another set may write at another time.
        are_all_here = len(self.replica_set) == self.comm.size
        settle(trainer, self.comm if are_all_here else None)
        optimizers = [optimizer for optimizer in optimizers_of(target) if optimizer.has_pending]
        try:  # the master saves the state of each rank of the set
            for optimizer in optimizers:
                own = optimizer.communicator.rank, optimizer.pending()
                optimizer.pending_elsewhere = dict(self._gathered(own)[1:])
            if self._label is not None:
                self._random_states = self._gathered(random_states.current())
            if self.is_master:
                self.snapshot(trainer)
        finally:
            self._random_states = []
            for optimizer in optimizers:
                optimizer.pending_elsewhere = {}

    def resume(
        self, trainer: chainer.training.Trainer, path: str | os.PathLike[str] | None = None
    ) -> bool:
        """Load a snapshot before training starts, if there is one. Collective.

        Rank 0 prints which snapshot is loaded. If training is already complete, the trainer's
        ``run`` returns at once, and rank 0 says so on standard error.

        Parameters
        ----------
        trainer : chainer.training.Trainer
            Trainer to load.
        path : path, optional
            Snapshot to load, whatever its settings; if several ranks write, that of the lowest.
            By default, this is the newest one with the same settings in the trainer's folder.

        Returns
        -------
        bool
            Whether a snapshot was loaded.

        Raises
        ------
        OSError, ValueError, RuntimeError
            On every rank, if the folder has snapshots, but none with the same settings; if a rank
            that writes cannot read ``path``; if the snapshot holds pickles other than None,
            numbers and strings, which could run code; or if it does not fit the trainer of any
            rank. In the last case, part of it may have been loaded.
        """
        if path is None:
            directory = Path(trainer.out)
            run_together(self.comm, _WHERE, lambda: self._remove_unfinished(directory))
            name = self._newest_common_name(directory)
            if name is None:
                return False
            file = directory / f"{name}.{self.master}"
        else:
            file = Path(path)
            if len(self.replica_set) < self.comm.size:  # each set has a file of its own
                file = file.with_name(re.sub(r"\.\d+$", "", file.name) + f".{self.master}")
        self._load(file, trainer)
        ended = _end_if_finished(trainer)
        if self.comm.rank == 0:
            updater = trainer.updater
            place = f"iteration {updater.iteration}, epoch {updater.epoch}"
            # A script with --quiet hides standard output.
            stream = sys.stderr if ended else sys.stdout
            print(f"resuming after {place}, from {file}{ended}", file=stream, flush=True)
        return True

    def serialize(self, serializer: chainer.AbstractSerializer) -> None:
        """Load or save settings and random states, if settings were given."""
        if self._label is None:
            return
        if isinstance(serializer, chainer.Serializer):
            serializer(LABEL, np.array(self._label))
            if self._random_states:
                serializer("random_states", np.stack(self._random_states))
            return
        # A snapshot after an error, or of other ranks, lacks the state of this rank.
        with contextlib.suppress(KeyError):
            states = serializer("random_states", None)
            if len(states) == len(self.replica_set):
                random_states.restore(states[sorted(self.replica_set).index(self.comm.rank)])

    def _target(self, trainer: chainer.training.Trainer) -> Any:
        return trainer if self.snapshot._target is None else self.snapshot._target

    def _gathered(self, own: Any) -> list[Any]:
        """Return the values of all ranks of the set, on the master only, its own first."""
        if not self.is_master:
            self.comm.send_obj(own, self.master)
            return []
        others = sorted(self.replica_set - {self.master})
        return [own, *(self.comm.recv_obj(rank) for rank in others)]

    def finalize(self) -> None:
        """Wait for the snapshot's writer."""
        if self.is_master:
            self.snapshot.finalize()

    def _load(self, path: Path, trainer: chainer.training.Trainer) -> None:
        """Load a snapshot from the file of this rank's set."""
        contents = run_together(self.comm, _WHERE, path.read_bytes if self.is_master else bytes)
        if self.is_master:
            for rank in self.replica_set - {self.master}:
                self.comm.send_obj(contents, rank)
        else:
            contents = self.comm.recv_obj(self.master)
        run_together(self.comm, _WHERE, lambda: load(path, contents, self._target(trainer)))

    def _newest_common_name(self, directory: Path) -> str | None:
        """Return the name, without suffix, of the newest snapshot that all ranks can load.

        Raises ValueError on all ranks if those that there are have other settings.
        """
        own = run_together(self.comm, _WHERE, lambda: self._times(directory))
        everywhere = enumerate(self.comm.allgather_obj(own))
        by_rank = {rank: times for rank, times in everywhere if times is not None}
        common = set.intersection(*map(set, by_rank.values()))
        if any(by_rank.values()) and not common and self.comm.rank == 0:
            counts = ", ".join(f"{len(times)} by rank {rank}" for rank, times in by_rank.items())
            warnings.warn(
                f"{_WHERE}: nothing is loaded from {directory}, because the ranks that write now "
                f"have no snapshot in common there: {counts}. Was the number of ranks different, "
                "or replica_sets? With replica_sets=[], any number of ranks can load a snapshot",
                stacklevel=4,
            )
        # Sorted by the times of the first set alone: clocks of other hosts may differ.
        first, passed_over = by_rank[min(by_rank)], ""
        for name in sorted(common, key=lambda name: (first[name], _numbers(name)), reverse=True):
            path = directory / f"{name}.{self.comm.rank}"
            find = partial(find_damage, path) if self.is_master else str
            compare = partial(difference, path, self._label) if self.is_master else str
            fault = run_together(self.comm, _WHERE, find)
            if not is_usable_everywhere(self.comm, f"snapshot {path}", fault):
                continue
            differs = run_together(self.comm, _WHERE, compare)
            found = next(filter(None, self.comm.allgather_obj(differs)), "")
            if not found:
                return str(name)
            passed_over = passed_over or found
        if passed_over:
            raise ValueError(
                f"{passed_over}. Use the same settings to resume that run, or a folder other than "
                f"{directory} for a new one"
            )
        return None

    def _remove_unfinished(self, directory: Path) -> None:
        """Remove the unfinished snapshots of a job that was killed."""
        if self.is_master and directory.is_dir():
            # Chainer writes snapshots in folders with these names.
            unfinished = re.compile(rf"tmp{self._pattern()}.*")
            for folder in directory.iterdir():
                if unfinished.fullmatch(folder.name) and folder.is_dir():
                    shutil.rmtree(folder, ignore_errors=True)

    def _pattern(self) -> str:
        """Return a pattern for the names of this rank's snapshots; group 1 lacks the suffix."""
        if callable(self._plain_filename):
            raise TypeError("autoload needs a snapshot whose filename is a string")
        stem = ".*".join(map(re.escape, re.split(r"\{.*\}", self._plain_filename)))
        return rf"({stem})\.{self.comm.rank}"

    def _times(self, directory: Path) -> dict[str, float] | None:
        """Return this rank's snapshots and when they were written; None if it writes none."""
        if not self.is_master:
            return None
        pattern = re.compile(self._pattern())
        return {
            found[1]: file.stat().st_mtime
            for file in (directory.iterdir() if directory.is_dir() else ())
            if (found := pattern.fullmatch(file.name)) and file.is_file()
        }


def _numbers(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name)]


def _end_if_finished(trainer: chainer.training.Trainer) -> str:
    """Make a trainer stop at once if its training is complete, and return a text about it."""
    length_of = getattr(trainer.stop_trigger, "get_training_length", None)
    if length_of is None:
        return ""
    length, unit = length_of()
    done = getattr(trainer.updater, unit)
    if done < length:
        return ""
    # Chainer's own trigger would wait for the next multiple of its length.
    trainer.stop_trigger = lambda _: True
    plural = unit if done == 1 else f"{unit}s"
    return (
        f". Training has ended there, after {done} {plural}: ask for more, or use a folder "
        f"other than {trainer.out} to start over"
    )
