"""Write and load one snapshot for all ranks whose trainers are replicas."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import chainer
from chainer.training.extension import Extension
from chainer.training.extensions.snapshot_writers import ProcessQueueWriter, ProcessWriter

from chainermn import spans
from chainermn.agreement import check_equal, run_together
from chainermn.arguments import check_communicator, check_has
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.extensions.exactness import not_restored
from chainermn.extensions.folder_lock import FolderLock
from chainermn.extensions.rank_states import Arrays, differences, own_state
from chainermn.extensions.snapshot_contents import Record, label_of, load, save
from chainermn.extensions.snapshot_files import SnapshotFiles
from chainermn.notes import note_once
from chainermn.optimizers.multi_node_optimizer import MultiNodeOptimizer
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
        with the same settings, from the highest iteration. A note on rank 0 then also tells what
        a resumed run would not repeat bit for bit.

    Returns
    -------
    MultiNodeSnapshot
        Extension for the trainer of every rank.

    Raises
    ------
    ValueError, TypeError
        On every rank, if ``snapshot`` is not a snapshot, or its writer starts processes; if
        ``replica_sets`` or ``settings`` are invalid or differ between ranks; or if ``settings``
        are given for a snapshot of an object other than the trainer.

    Notes
    -----
    With ``autoload=True``, or in `MultiNodeSnapshot.resume`, all sets load the newest snapshot
    that every set has, and skip damaged files. A file that could run code is not skipped; every
    rank raises. Without ``settings``, the newest is the one written last.

    Each rank gets back what it had of its own: the order of its examples and its position, its
    persistent values, the random generators of NumPy and Python, and those that its data set has.
    Gradients that ranks still have to send are kept too, except with ``double_buffering``.
    Snapshots of ``snapshot_on_error`` have only what the rank that writes had.

    You can resume with a different number of ranks if the same ranks write. All ranks then start
    with the persistent values of the rank that wrote. The shuffled order of an iterator fits only
    the number of examples that a rank had. If this number changes, the iterator resumes at the
    same fraction of the epoch, in its own order. With `create_distributed_sampler`, or another
    order sampler with a method ``order(epoch)``, each rank resumes with its part of the same
    epoch, for any number of ranks.

    With ``n_retains``, only files that this run has written are deleted, also before it resumed.

    All ranks wait for the one that writes, unless the snapshot has a ``ThreadWriter`` or a
    ``ThreadQueueWriter``. Writing is much faster without compression:
    ``extensions.snapshot(savefun=functools.partial(save_npz, compression=False))``.

    Examples
    --------
    >>> snapshot = training.extensions.snapshot(filename="snapshot_{.updater.epoch}")
    >>> snapshot = chainermn.extensions.multi_node_snapshot(comm, snapshot, [])
    >>> trainer.extend(snapshot, trigger=(1, "epoch"))
    >>> trainer.run()
    >>> import glob
    >>> sorted(glob.glob("*", root_dir="result"))
    ['snapshot_1.0', 'snapshot_2.0']
    """
    check_communicator(f"{_WHERE}(comm, snapshot, replica_sets)", comm, snapshot)

    def check() -> tuple[list[set[int]], str | None]:
        expected = "a snapshot, as chainer.training.extensions.snapshot returns"
        check_has(_WHERE, snapshot, expected, "filename")
        _check_writer(snapshot)
        if settings is not None and snapshot._target is not None:
            raise ValueError("settings are for snapshots of the whole trainer")
        return parse_replica_sets(replica_sets, comm.size), label_of(settings)

    sets, label = run_together(comm, _WHERE, check)
    check_equal(comm, f"replica_sets={[sorted(ranks) for ranks in sets]}", _WHERE)
    check_equal(comm, f"settings={label}", _WHERE)
    return MultiNodeSnapshot(comm, snapshot, sets, label)


def _check_writer(snapshot: Extension) -> None:
    """Raise ValueError if a snapshot's writer starts processes."""
    writer = getattr(snapshot, "writer", None)
    if isinstance(writer, (ProcessWriter, ProcessQueueWriter)):
        name = type(writer).__name__
        raise ValueError(
            f"the snapshot's writer is a {name}, which starts a process after MPI has started; "
            f"use {name.replace('Process', 'Thread')} instead"
        )


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
        self._record: Record | None = None  # while a snapshot is taken
        self._states: list[dict[str, Any]] = []
        self._written: list[str] = []
        self._has_loaded = False
        self.replica_set = next(ranks for ranks in replica_sets if comm.rank in ranks)
        self.master = min(self.replica_set)
        # Another set may write at another time.
        self._is_alone = len(self.replica_set) == comm.size
        self._set = comm if self._is_alone else comm.split(self.master, comm.rank)
        plain = snapshot.filename
        self._files = SnapshotFiles(comm, plain, self.is_master, label)
        stem = "" if callable(plain) else plain.partition("{")[0].replace("/", "_")
        self._lock = FolderLock(comm, stem or "snapshot")
        if callable(plain):
            snapshot.filename = lambda trainer: f"{plain(trainer)}.{comm.rank}"
        else:
            snapshot.filename = f"{plain}.{comm.rank}"

    @property
    def is_master(self) -> bool:
        """Whether this rank writes."""
        return self.comm.rank == self.master

    def initialize(self, trainer: chainer.training.Trainer) -> None:
        """Lock the trainer's folder; if ``autoload`` is on, load the newest snapshot. Collective.

        Raises on every rank if another job writes snapshots into the folder, and does not end
        within 30 seconds; if the snapshot does not fit the trainer of any rank; or if it holds
        pickles other than None, numbers and strings, which could run code. Warns about each
        damaged snapshot that it skips. Rank 0 warns if nothing is loaded because the ranks that
        write now have no snapshot in common.
        """
        settings = self.snapshot.autoload, self.snapshot.n_retains
        self.snapshot.autoload, self.snapshot.n_retains = False, -1
        if self.is_master:
            self.snapshot.initialize(trainer)
        self.snapshot.autoload, self.snapshot.n_retains = settings
        folder = Path(trainer.out)
        self._lock.acquire(folder)
        is_due = self.snapshot.autoload and not self._has_loaded
        if is_due and (name := self._files.newest(folder)) is not None:
            self._load(folder / f"{name}.{self.master}", trainer)
        if self.is_master and self.snapshot.n_retains > 0:
            self._delete_old_files(folder)

    def on_error(self, trainer: chainer.training.Trainer, exc: Exception, tb: Any) -> None:
        """Write a snapshot, if ``snapshot_on_error`` is on."""
        if self.is_master:
            with contextlib.suppress(Exception):  # the error itself is more important
                self._keep(trainer, [own_state(trainer)], [])  # other ranks may be gone
            try:
                self.snapshot.on_error(trainer, exc, tb)
            finally:
                self._record, self._states = None, []

    @spans.spanned("checkpoint")
    def __call__(self, trainer: chainer.training.Trainer) -> None:
        """Write a snapshot. Every rank of the set must call it."""
        settle(trainer, self.comm if self._is_alone else None)
        optimizers = [each for each in optimizers_of(self._target(trainer)) if each.has_pending]
        try:  # the master saves the state of each rank of the set
            self._gather(trainer, optimizers)
            if self.is_master:
                self.snapshot(trainer)
        finally:
            self._record, self._states = None, []
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
            On every rank, if the folder has snapshots, but none with the same settings; if another
            job writes into it, and does not end within 30 seconds; if a rank that writes cannot
            read ``path``; if the snapshot holds pickles other than None, numbers and strings,
            which could run code; or if it does not fit the trainer of any rank. In the last case,
            part of it may have been loaded.
        """
        folder = Path(trainer.out)
        if not path:
            self._lock.acquire(folder)
            run_together(self.comm, _WHERE, lambda: self._files.remove_unfinished(folder))
            name = self._files.newest(folder)
            if name is None:
                return False
            file = folder / f"{name}.{self.master}"
        else:
            file = Path(path)
            if not self._is_alone:  # each set has a file of its own
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
        """Save settings and what each rank has of its own; loading does not need the extension."""
        # Another extension may be saving the trainer.
        if isinstance(serializer, chainer.Serializer) and self._record is not None:
            save(serializer, self._label, self._record, self._states)

    def wait(self) -> None:
        """Wait until the snapshots are written. Collective in the set.

        Raises on every rank of the set if one could not be written.
        """
        run_together(self._set, _WHERE, self.snapshot.finalize)

    def finalize(self) -> None:
        """Wait for the snapshot's writer, and let other jobs use the folder."""
        try:
            self.snapshot.finalize()
        finally:
            self._lock.release()

    def _target(self, trainer: chainer.training.Trainer) -> Any:
        return trainer if self.snapshot._target is None else self.snapshot._target

    def _gather(
        self, trainer: chainer.training.Trainer, optimizers: Sequence[MultiNodeOptimizer]
    ) -> None:
        """Give the master what each rank of the set has of its own. Collective in the set."""

        def own() -> tuple[list[Any], dict[str, Any], list[str]]:
            pending = [(each.communicator.rank, each.pending()) for each in optimizers]
            if self._target(trainer) is not trainer:
                return pending, {}, []
            return pending, own_state(trainer), not_restored(trainer)

        everywhere = self._set.gather_obj(run_together(self._set, _WHERE, own))
        if everywhere is None:
            return
        pending, states, faults = zip(*everywhere, strict=True)
        for index, optimizer in enumerate(optimizers):
            optimizer.pending_elsewhere = dict(of_rank[index] for of_rank in pending[1:])
        name = self.snapshot.filename
        name = name(trainer) if callable(name) else name.format(trainer)
        self._written = [*(old for old in self._written if old != name), name]
        texts = sorted({text for of_rank in faults for text in of_rank})
        self._keep(trainer, states, texts)
        self._tell_what_differs(texts)

    def _keep(
        self, trainer: chainer.training.Trainer, states: Sequence[Arrays], texts: Sequence[str]
    ) -> None:
        """Keep what is saved beside the trainer, with the states of the set's first ranks."""
        if self._target(trainer) is trainer:
            ranks = sorted(self.replica_set)[: len(states)]
            # Otherwise a file would depend on how often snapshots are taken.
            most = self.snapshot.n_retains
            written = self._written[-most:] if most > 0 else ()
            self._record = Record(self.comm.size, ranks, written, texts)
            self._states = differences(states)

    def _tell_what_differs(self, texts: Sequence[str]) -> None:
        if texts and self._label is not None and self.is_master:
            note_once(f"a resumed run will not repeat every bit: {'; '.join(texts)}")

    def _delete_old_files(self, folder: Path) -> None:
        """After each file that this run writes, delete its older ones."""
        add = getattr(self.snapshot.writer, "_add_cleanup_hook", None)
        if add is None or callable(self.snapshot.filename):  # as in Chainer
            return

        def delete() -> None:
            # A writer may still have to write some.
            complete = [name for name in self._written if (folder / name).exists()]
            for name in complete[: -self.snapshot.n_retains]:
                (folder / name).unlink(missing_ok=True)

        add(delete)

    def _load(self, path: Path, trainer: chainer.training.Trainer) -> None:
        """Load a snapshot from the file of this rank's set."""
        read = path.read_bytes if self.is_master else bytes
        contents = self._set.bcast_obj(run_together(self.comm, _WHERE, read))
        rank, size = self.comm.rank, self.comm.size
        target = self._target(trainer)
        record = run_together(self.comm, _WHERE, lambda: load(path, contents, target, rank, size))
        self._has_loaded = True
        if path.parent == Path(trainer.out):
            before = (name for name in record.written if name == Path(name).name != path.name)
            self._written = [*before, path.name]
        if rank == 0 and record.size not in (0, size):
            note_once(
                f"{path} was written by {record.size} ranks: {size} ranks divide the rest of the "
                "epoch again, all start with the persistent values of the rank that wrote it, "
                "and their random numbers differ from those of an uninterrupted run"
            )
        elif rank == 0 and record.size and not self.replica_set <= {*record.ranks}:
            note_once(
                f"{path} holds what ranks {record.ranks} had of their own, perhaps because it was "
                "written after an error: other ranks start with the order and the persistent "
                "values of the rank that wrote it"
            )
        self._tell_what_differs(record.not_restored)


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
