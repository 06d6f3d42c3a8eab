"""Write and read one snapshot for all ranks whose trainers are replicas."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import chainer
import numpy as np
from chainer.training.extension import Extension

from chainermn.agreement import check_equal, run_together
from chainermn.arguments import check_communicator, check_has
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.datasets.distributed_sampler import DistributedOrderSampler
from chainermn.extensions.npz_files import find_damage, is_usable_everywhere
from chainermn.optimizers.multi_node_optimizer import MultiNodeOptimizer, sending_later

_WHERE = "multi_node_snapshot"


def multi_node_snapshot(
    comm: CommunicatorBase,
    snapshot: Extension,
    replica_sets: Sequence[int | Iterable[int]],
) -> MultiNodeSnapshot:
    """Let ranks whose trainers are replicas write one snapshot, and resume from it.

    Parameters
    ----------
    comm : CommunicatorBase
    snapshot : extension
        From ``chainer.training.extensions.snapshot`` or ``snapshot_object``. The number of the
        writing rank is appended to its ``filename``, as ``.{rank}``.
    replica_sets : sequence of (int or iterable of int)
        Disjoint sets of ranks whose trainers are replicas of each other. The lowest rank of a set
        writes for the whole set. Ranks in none of them form one more set: ``[]`` means one
        snapshot for all ranks; use ``[0]`` if rank 0 has extensions that the others lack.

    Returns
    -------
    MultiNodeSnapshot
        Call ``trainer.extend(snapshot, trigger=(1, 'epoch'))`` with it on every rank.

    Raises
    ------
    ValueError, TypeError
        On every rank, if ``replica_sets`` is anything else or differs between ranks, or
        ``snapshot`` is not a snapshot.

    Notes
    -----
    With ``autoload=True``, all sets load the newest snapshot that every set has, skipping damaged
    files. You can resume with another number of ranks if the same ranks write. An iterator's
    shuffled order fits only the number of examples that a rank had. If a rank now has another
    number, its iterator resumes at the same fraction of the epoch, in its own order. With
    `create_distributed_sampler`, each rank resumes with its own part of the same epoch, for any
    number of ranks. What each rank still has to send is in the snapshot too, except in that of
    ``snapshot_on_error``, and is loaded by the same number of ranks.
    """
    check_communicator(f"{_WHERE}(comm, snapshot, replica_sets)", comm, snapshot)

    def check() -> list[set[int]]:
        expected = "a snapshot, as chainer.training.extensions.snapshot returns"
        check_has(_WHERE, snapshot, expected, "filename")
        return parse_replica_sets(replica_sets, comm.size)

    sets = run_together(comm, _WHERE, check)
    check_equal(comm, f"replica_sets={[sorted(ranks) for ranks in sets]}", _WHERE)
    return MultiNodeSnapshot(comm, snapshot, sets)


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
    """Writes and reads the snapshots of one replica set; see `multi_node_snapshot`.

    Attributes
    ----------
    replica_set : set of int
        Ranks that share snapshots with this one.
    master : int
        The rank of this set that writes.
    """

    trigger = 1, "epoch"
    priority = -100  # as Chainer's snapshots: after everything that reports
    default_name = "_MultiNodeSnapshot"  # the original's, which snapshots contain

    def __init__(
        self, comm: CommunicatorBase, snapshot: Extension, replica_sets: list[set[int]]
    ) -> None:
        self.comm = comm
        self.snapshot = snapshot
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
        """Load the newest snapshot, if ``autoload`` is on; then this is collective.

        Raises on every rank if the snapshot does not fit the trainer of any. Warns of each damaged
        snapshot, which is skipped; and, on rank 0, if nothing is loaded because the ranks that
        write now have no snapshot in common.
        """
        autoload, self.snapshot.autoload = self.snapshot.autoload, False
        if self.is_master:
            self.snapshot.initialize(trainer)
        self.snapshot.autoload = autoload
        if autoload:
            self._autoload(trainer)

    def on_error(self, trainer: chainer.training.Trainer, exc: Exception, tb: Any) -> None:
        """Write a snapshot, if ``snapshot_on_error`` is on."""
        if self.is_master:
            self.snapshot.on_error(trainer, exc, tb)

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        """Write a snapshot. Every rank of the set must call it."""
        target = self._target(trainer)
        with contextlib.ExitStack() as stack:
            for optimizer in sending_later(trainer):
                optimizer.settle()
            for optimizer in sending_later(target):
                stack.enter_context(self._with_states_of_all(optimizer))
            if self.is_master:
                self.snapshot(trainer)

    def _target(self, trainer: chainer.training.Trainer) -> Any:
        return trainer if self.snapshot._target is None else self.snapshot._target

    @contextlib.contextmanager
    def _with_states_of_all(self, optimizer: MultiNodeOptimizer) -> Iterator[None]:
        """Let the master save what each rank of the set still has to send."""
        own = optimizer.communicator.rank, optimizer.unsent()
        if not self.is_master:
            self.comm.send_obj(own, self.master)
            yield
            return
        others = sorted(self.replica_set - {self.master})
        optimizer.unsent_elsewhere = dict(self.comm.recv_obj(rank) for rank in others)
        try:
            yield
        finally:
            optimizer.unsent_elsewhere = {}

    def finalize(self) -> None:
        """Wait for the snapshot's writer."""
        if self.is_master:
            self.snapshot.finalize()

    def _autoload(self, trainer: chainer.training.Trainer) -> None:
        directory = Path(trainer.out)
        name = self._newest_common_name(directory)
        if name is None:
            return
        if self.is_master:
            contents = (directory / f"{name}.{self.comm.rank}").read_bytes()
            for rank in self.replica_set - {self.master}:
                self.comm.send_obj(contents, rank)
        else:
            contents = self.comm.recv_obj(self.master)
        target = self._target(trainer)
        run_together(self.comm, _WHERE, lambda: _load(contents, target))

    def _newest_common_name(self, directory: Path) -> str | None:
        """Return the name, without suffix, of the newest snapshot that all ranks can load."""
        own = run_together(self.comm, _WHERE, lambda: self._times(directory))
        everywhere = enumerate(self.comm.allgather_obj(own))
        by_rank = {rank: times for rank, times in everywhere if times is not None}
        common = set.intersection(*map(set, by_rank.values()))
        if any(by_rank.values()) and not common and self.comm.rank == 0:
            counts = ", ".join(f"{len(times)} by rank {rank}" for rank, times in by_rank.items())
            warnings.warn(
                f"{_WHERE}: nothing is loaded from {directory}, as no snapshot there was written "
                f"by each of the ranks that write now; there are {counts}. Was the number of "
                "ranks different, or replica_sets? With replica_sets=[], any number of ranks can "
                "load a snapshot",
                stacklevel=4,
            )
        # Sorted by the times of the first set alone: clocks of other hosts may differ.
        first = by_rank[min(by_rank)]
        for name in sorted(common, key=lambda name: (first[name], name), reverse=True):
            path = directory / f"{name}.{self.comm.rank}"
            fault = find_damage(path) if self.is_master else ""
            if is_usable_everywhere(self.comm, f"snapshot {path}", fault):
                return str(name)
        return None

    def _times(self, directory: Path) -> dict[str, float] | None:
        """Return this rank's snapshots and their times of writing; None if it writes none."""
        if not self.is_master:
            return None
        if callable(self._plain_filename):
            raise TypeError("autoload needs a snapshot whose filename is a string")
        stem = ".*".join(map(re.escape, re.split(r"\{.*\}", self._plain_filename)))
        pattern = re.compile(rf"({stem})\.{self.comm.rank}")
        return {
            found[1]: file.stat().st_mtime
            for file in (directory.iterdir() if directory.is_dir() else ())
            if (found := pattern.fullmatch(file.name)) and file.is_file()
        }


def _load(contents: bytes, target: Any) -> None:
    with np.load(io.BytesIO(contents), allow_pickle=True) as saved:
        fitted = _fit_iterators(saved, target)
        chainer.serializers.NpzDeserializer(ChainMap(fitted, saved)).load(target)


def _fit_iterators(saved: Mapping[str, Any], trainer: Any) -> dict[str, Any]:
    """Return replacements for the orders and positions in ``saved`` that do not fit this rank."""
    fitted: dict[str, Any] = {}
    for key in saved:
        found = re.fullmatch(r"(updater/iterator:([^/]+)/)order", key)
        if found is None:
            continue
        prefix, name = found.groups()
        iterator = trainer.updater.get_iterator(name)
        sampler = getattr(iterator, "order_sampler", None)
        if isinstance(sampler, DistributedOrderSampler):
            order = sampler.order(int(saved[f"{prefix}epoch"]))
        else:
            now = chainer.serializers.DictionarySerializer()
            iterator.serialize(now)
            order = now.target.get("order")
            if order is None or np.shape(order) == saved[key].shape:
                continue
        position = saved[f"{prefix}current_position"]
        fitted[key] = order
        fitted[f"{prefix}current_position"] = position * len(order) // len(saved[key])
    return fitted
