"""Save checkpoints of all ranks together, in one file per rank."""

from __future__ import annotations

import io
import os
import sys
import time
from pathlib import Path
from typing import Any

import chainer
import numpy as np
from chainer.training.extension import Extension

from chainer_compat.npz import open_npz
from chainermn import spans
from chainermn.agreement import check_equal, run_on_root, run_together
from chainermn.arguments import check_communicator
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.extensions.checkpoint_files import Checkpoint, CheckpointFiles
from chainermn.extensions.folder_lock import FolderLock
from chainermn.extensions.npz_files import is_usable_everywhere
from chainermn.extensions.rank_states import generator_states, restore_generators
from chainermn.extensions.snapshot_contents import digests_of_model, lengths_of_data, load
from chainermn.optimizers.settling import compare

_WHERE = "maybe_load"


def create_multi_node_checkpointer(
    name: str,
    comm: CommunicatorBase,
    cp_interval: int = 5,
    gc_interval: int = 5,
    path: str | os.PathLike[str] | None = None,
) -> MultiNodeCheckpointer:
    """Create an extension that lets an interrupted job resume.

    Each rank writes the state of its own trainer, and `MultiNodeCheckpointer.maybe_load` loads
    the newest complete checkpoint. Use it for fault tolerance, not to keep models: the files are
    deleted when training ends.

    Parameters
    ----------
    name : str
        Prefix of the file names, ``{name}.{rank}.{iteration}``.
    comm : CommunicatorBase
        Communicator of all ranks.
    cp_interval : int
        Smallest number of checkpoints to keep.
    gc_interval : int
        Number of further checkpoints after which old ones are deleted.
    path : path, optional
        Folder of the files, shared by all hosts or local to each; the trainer's folder by
        default.

    Returns
    -------
    MultiNodeCheckpointer
        Extension for the trainer of every rank.

    Raises
    ------
    TypeError
        If ``comm`` is not a communicator.
    ValueError
        On every rank, if an argument is invalid, or if ``name`` differs between ranks.

    Notes
    -----
    With the same number of ranks, each rank resumes with its own state. A different number can
    resume if the models were replicas: all ranks then load the file of rank 0. The iteration, the
    epoch and the optimizer's state continue, and iterators resume at the same fraction of the
    epoch, as with `multi_node_snapshot`.

    Chainer does not save the learning rate, so it is the one that your script sets; if you compute
    it from ``comm.size``, it fits the new number of ranks. Only extensions such as
    ``ExponentialShift`` keep the saved value until they next change it.

    Examples
    --------
    >>> checkpointer = chainermn.create_multi_node_checkpointer("mnist", comm)
    >>> trainer.extend(checkpointer, trigger=(1000, "iteration"))
    >>> checkpointer.maybe_load(trainer, optimizer)
    >>> trainer.run()
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
    """The extension that `create_multi_node_checkpointer` returns.

    Examples
    --------
    Save any object that ``chainer.serializers`` can save, and load it again:

    >>> checkpointer = chainermn.create_multi_node_checkpointer("model", comm, path="result")
    >>> checkpointer.save(model, iteration=1)
    >>> checkpointer.maybe_load(model)
    >>> checkpointer.get_stats()
    'Snapshot duration stats (sec): avg=..., min=..., max=...'
    """

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
        self.path: Any = Path(path) if path else None
        self._lock = FolderLock(comm, name)
        self._seconds: list[float] = []
        self._run: int | None = None

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        """Write a checkpoint of ``trainer``. Every rank must call it in the same iteration."""
        self.save(trainer, trainer.updater.iteration)

    @spans.spanned("checkpoint")
    def save(self, target: Any, iteration: int) -> None:
        """Write a checkpoint of an object that ``chainer.serializers`` can save. Collective.

        Parameters
        ----------
        target : object
            Object to save, such as a trainer or a model.
        iteration : int
            Number of the checkpoint; the one with the highest number is the newest.

        Raises
        ------
        OSError
            On ranks that cannot write their file; other ranks raise RuntimeError. Earlier
            checkpoints are kept.
        RuntimeError
            On every rank, if another job writes into the folder of rank 0, and does not end
            within 30 seconds.
        """
        self._settle_path(target)
        compare(target, self.comm)
        files = self._files
        if self._run is None:
            self._run = self.comm.bcast_obj(int.from_bytes(os.urandom(7)))
        run = self._run

        def write() -> list[int]:
            start = time.perf_counter()
            arrays = chainer.serializers.npz.serialize(target)
            if isinstance(target, chainer.training.Trainer):
                arrays |= {**lengths_of_data(arrays, target), **generator_states(target)}
            files.write(arrays, iteration, run)
            self._seconds.append(time.perf_counter() - start)
            return files.own_iterations()

        by_rank = self.comm.allgather_obj(run_together(self.comm, "checkpoint", write))
        is_due = max(map(len, by_rank)) > self.cp_interval + self.gc_interval
        kept = sorted(set.intersection(*map(set, by_rank)))[-self.cp_interval :]
        if is_due and len(kept) == self.cp_interval:
            files.remove(before=kept[0])

    def maybe_load(
        self,
        trainer: Any,
        optimizer: Any = None,
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        """Load the newest complete checkpoint, if there is one. Collective.

        A checkpoint is complete if all ranks together find all of its files, either in one folder
        or each in its own. If a different number of ranks wrote it, all ranks load the file of
        rank 0.

        Parameters
        ----------
        trainer : chainer.training.Trainer
            Trainer to load, or another object that was given to `save`.
        optimizer : MultiNodeOptimizer, optional
            Ignored, because the optimizer of ``trainer`` is loaded; accepted for scripts written
            for the original ChainerMN.
        path : path, optional
            Folder of the files from now on.

        Raises
        ------
        ValueError
            On every rank, if a different number of ranks wrote the newest checkpoint, and their
            parameters differ.
        OSError
            On a rank that cannot read the file of another rank, or whose file holds pickles other
            than None, numbers and strings, which could run code; other ranks raise RuntimeError.
        RuntimeError
            On every rank, if there are checkpoints but none fits ``trainer``, or if another job
            writes into the folder of rank 0, and does not end within 30 seconds. Part of one may
            have been loaded. A UserWarning names each file that is skipped because it is damaged,
            belongs to another job, or does not fit.
        """
        self._settle_path(trainer, path)
        files, failure = self._files, ""
        files.remove_unfinished()
        for checkpoint in files.complete():
            name = f"checkpoint {files.path(checkpoint.iteration)}"
            if is_usable_everywhere(self.comm, name, self._load(checkpoint, trainer)):
                return
            failure = f"the checkpoint of iteration {checkpoint.iteration} did not fit"
        if failure:
            raise RuntimeError(
                f"{_WHERE}: {failure}, nor did any older one; part of it may have been loaded. "
                f"Use another name than {self.name!r} or another path than {self.path} for "
                "another model"
            )

    def finalize(self) -> None:
        """Delete the checkpoints of this rank, unless an exception ends training."""
        if self.path is not None and sys.exc_info()[0] is None:
            self._files.remove()
        self._lock.release()

    def get_stats(self) -> str:
        """Return a text with the mean, shortest and longest time of writing on this rank."""
        if not self._seconds:
            return "No snapshot was taken"
        mean, least, most = np.mean(self._seconds), min(self._seconds), max(self._seconds)
        return f"Snapshot duration stats (sec): avg={mean:f}, min={least:f}, max={most:f}"

    def _settle_path(self, target: Any, path: str | os.PathLike[str] | None = None) -> None:
        if path:
            self.path = Path(path)
        if self.path is None:
            if not hasattr(target, "out"):
                raise ValueError(
                    f"{type(target)} has no output folder, unlike a trainer: give a path to "
                    "create_multi_node_checkpointer"
                )
            self.path = Path(target.out)
        self._lock.acquire(self.path)

    @property
    def _files(self) -> CheckpointFiles:
        return CheckpointFiles(self.path, self.name, self.comm)

    def _load(self, checkpoint: Checkpoint, target: Any) -> str:
        """Load a checkpoint; return why it does not fit this rank, or ``''``. Collective."""
        is_of_as_many = len(checkpoint.readers) == self.comm.size
        read = self._read_own if is_of_as_many else self._read_first
        source: Any = read(checkpoint, target)
        try:
            if is_of_as_many:
                with open_npz(source) as saved:
                    chainer.serializers.NpzDeserializer(saved).load(target)
                    if isinstance(target, chainer.training.Trainer):
                        restore_generators(target, saved)
            else:
                load(self._files.path(checkpoint.iteration, 0), source, target)
        except Exception as error:
            return f"it does not fit: {type(error).__name__}: {error}"
        return ""

    def _read_own(self, checkpoint: Checkpoint, target: Any) -> Any:
        """Return the file of this rank, or a copy of it from another host."""
        own: Any = str(self._files.path(checkpoint.iteration))
        failure: Exception | None = None
        for writer, reader in checkpoint.readers.items():
            if reader == writer:
                continue
            path = self._files.path(checkpoint.iteration, writer)
            if reader == self.comm.rank:
                try:
                    contents = path.read_bytes()
                except Exception as error:
                    contents = b""  # because its rank waits
                    failure = failure or error
                self.comm.send_obj(contents, writer)
            elif writer == self.comm.rank:
                own = io.BytesIO(self.comm.recv_obj(reader))

        def check() -> None:
            if failure is not None:
                raise failure

        run_together(self.comm, _WHERE, check)
        return own

    def _read_first(self, checkpoint: Checkpoint, target: Any) -> bytes:
        """Return the file of rank 0, if the parameters are the same in all."""
        iteration, readers = checkpoint

        def digests() -> dict[int, dict[str, bytes]]:
            mine = [writer for writer, reader in readers.items() if reader == self.comm.rank]
            paths = {writer: self._files.path(iteration, writer) for writer in mine}
            return {rank: digests_of_model(path, target) for rank, path in paths.items()}

        found = self.comm.allgather_obj(run_together(self.comm, _WHERE, digests))
        by_rank = {rank: digests for of_reader in found for rank, digests in of_reader.items()}
        for rank, of_rank in sorted(by_rank.items()):
            for name in sorted(by_rank[0].keys() | of_rank.keys()):
                if of_rank.get(name) != by_rank[0].get(name):
                    raise ValueError(
                        f"{_WHERE}: the checkpoint of iteration {iteration} was written by "
                        f"{len(readers)} ranks that are not replicas: {name} differs between "
                        f"rank 0 and rank {rank}. So {self.comm.size} ranks cannot load it; start "
                        f"{len(readers)} ranks, or start over with another name than "
                        f"{self.name!r} or another path than {self.path}"
                    )
        path = self._files.path(iteration, 0)
        return run_on_root(self.comm, readers[0], _WHERE, path.read_bytes)
