"""Checkpoint all ranks together, in one file per rank."""

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

from chainermn import spans
from chainermn.agreement import check_equal, run_on_root, run_together
from chainermn.arguments import check_communicator
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.extensions.checkpoint_files import Checkpoint, CheckpointFiles
from chainermn.extensions.npz_files import is_usable_everywhere
from chainermn.extensions.snapshot_contents import digests_of_model, lengths_of_data, load

_WHERE = "maybe_load"


def create_multi_node_checkpointer(
    name: str,
    comm: CommunicatorBase,
    cp_interval: int = 5,
    gc_interval: int = 5,
    path: str | os.PathLike[str] | None = None,
) -> MultiNodeCheckpointer:
    """Create an extension that lets an interrupted job resume.

    Each rank writes the state of its own trainer; `MultiNodeCheckpointer.maybe_load` loads the
    newest checkpoint that is complete. Use it for fault tolerance, not for keeping models: the
    files are deleted when training ends.

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

    Notes
    -----
    The same number of ranks resumes with the state of each rank. Another number can resume if the
    models were replicas: then all ranks load what rank 0 wrote. The iteration, the epoch and the
    optimizer's state continue, and iterators resume at the same fraction of the epoch, as with
    `multi_node_snapshot`. The learning rate is what the script sets, as Chainer does not save it:
    one computed from ``comm.size`` fits the new number of ranks. Only ``ExponentialShift`` and
    the like keep the saved value until they next change it.
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
        self._run: int | None = None

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
        files = self._files
        if self._run is None:
            self._run = self.comm.bcast_obj(int.from_bytes(os.urandom(7)))
        run = self._run

        def write() -> list[int]:
            start = time.perf_counter()
            arrays = chainer.serializers.npz.serialize(target)
            files.write({**arrays, **lengths_of_data(arrays, target)}, iteration, run)
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
        """Load the newest checkpoint that is complete, if there is one. Collective.

        It is complete if all ranks together find all of its files, whether in one folder or each
        in its own. Another number of ranks than wrote it loads the file of rank 0.

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
        ValueError
            On every rank, if the newest checkpoint was written by another number of ranks, whose
            parameters differ.
        OSError
            On a rank that cannot read the file of another one, or whose file holds pickles of
            more than None, numbers and strings, which could run code; the others raise
            RuntimeError.
        RuntimeError
            On every rank, if there are checkpoints but none fits ``trainer``, part of which may
            have been loaded by then. A UserWarning names each file that is skipped: damaged, of
            another job, or not fitting.
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

    @property
    def _files(self) -> CheckpointFiles:
        return CheckpointFiles(self.path, self.name, self.comm)

    def _load(self, checkpoint: Checkpoint, target: Any) -> str:
        """Load a checkpoint; return why it does not fit this rank, or ``''``. Collective."""
        is_of_as_many = len(checkpoint.readers) == self.comm.size
        read = self._read_own if is_of_as_many else self._read_first
        source = read(checkpoint, target)
        try:
            if is_of_as_many:
                chainer.serializers.load_npz(source, target)
            else:
                load(self._files.path(checkpoint.iteration, 0), source, target)
        except Exception as error:
            return f"it does not fit: {type(error).__name__}: {error}"
        return ""

    def _read_own(self, checkpoint: Checkpoint, target: Any) -> Any:
        """Return the file of this rank, or a copy of what another host has."""
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
                        f"{len(readers)} ranks that are no replicas: {name} of rank {rank} is "
                        f"not that of rank 0. So {self.comm.size} ranks cannot load it; start as "
                        f"many as wrote it, or use another name than {self.name!r} or another "
                        f"path than {self.path} to begin anew"
                    )
        path = self._files.path(iteration, 0)
        return run_on_root(self.comm, readers[0], _WHERE, path.read_bytes)
