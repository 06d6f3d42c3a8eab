"""The files of checkpoints: their names, the job that wrote them, and which are complete."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from chainer_compat.npz import open_npz
from chainermn.agreement import run_together
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.extensions.npz_files import find_damage, is_usable_everywhere, write_npz

#: Name of the array that tells which job and rank wrote a file. Loading ignores unknown arrays.
LABEL = "chainermn_checkpoint"
_WHERE = "maybe_load"


class Job(NamedTuple):
    """The job that wrote the files of a checkpoint."""

    n_ranks: int
    #: A random number, because another job may have had as many ranks and iterations.
    run: int


class Checkpoint(NamedTuple):
    """A checkpoint that has all its files."""

    iteration: int
    #: For each rank that wrote a file, the rank of this job that reads it.
    readers: Mapping[int, int]


class CheckpointFiles:
    """The files ``{name}.{rank}.{iteration}`` in a folder, as a rank sees them.

    Parameters
    ----------
    folder : path
        Folder that all hosts share, or a local one of each.
    name : str
        Prefix of the file names.
    comm : CommunicatorBase
        Communicator of all ranks.
    """

    def __init__(self, folder: Path, name: str, comm: CommunicatorBase) -> None:
        self.folder = folder
        self._name = name
        self._comm = comm

    def path(self, iteration: int, rank: int | None = None) -> Path:
        """Return the path of a file, by default that of this rank."""
        writer = self._comm.rank if rank is None else rank
        return self.folder / f"{self._name}.{writer}.{iteration}"

    def write(self, arrays: Mapping[str, Any], iteration: int, run: int) -> None:
        """Write the file of this rank."""
        label = np.array([self._comm.size, self._comm.rank, iteration, run])
        self.folder.mkdir(parents=True, exist_ok=True)
        write_npz(self.path(iteration), {**arrays, LABEL: label})

    def own_iterations(self) -> list[int]:
        """Return the iterations for which this rank has a file, in order."""
        return sorted(iteration for rank, iteration in self._present() if rank == self._comm.rank)

    def remove(self, before: float = float("inf")) -> None:
        """Remove this rank's files from before an iteration, also those of earlier jobs.

        The ranks of this job divide the files of ranks that it no longer has.
        """
        size, own = self._comm.size, self._comm.rank
        for rank, iteration in self._present():
            if iteration < before and (rank == own or (rank >= size and rank % size == own)):
                self.path(iteration, rank).unlink(missing_ok=True)

    def remove_unfinished(self) -> None:
        """Remove files that this rank was writing when it was killed."""
        for leftover in self._beginning_with(f".{self._name}.{self._comm.rank}."):
            leftover.unlink(missing_ok=True)

    def complete(self) -> Iterator[Checkpoint]:
        """Yield the complete checkpoints, newest first. Collective.

        A UserWarning names each file that is skipped. A damaged file spoils only the checkpoint
        that it belongs to.
        """
        size = self._comm.size
        seen = self._comm.allgather_obj({iteration for _, iteration in self._present()})
        for iteration in sorted(set().union(*seen), reverse=True):
            own, fault = run_together(self._comm, _WHERE, partial(self._examine, iteration))
            everywhere = set(self._comm.allgather_obj((own, fault)))
            if len(everywhere) == 1 and own is not None and own.n_ranks == size and not fault:
                yield Checkpoint(iteration, {rank: rank for rank in range(size)})
                continue
            spoiled = {job for job, damage in everywhere if damage}
            found = self._gather(iteration, spoiled)
            if not found and own is not None and own.n_ranks != size and own not in spoiled:
                fault = f"the other files of {own.n_ranks} ranks are missing"
            self._are_usable(iteration, fault)
            for checkpoint in found:
                find = partial(self._damage_of_others, checkpoint)
                if self._are_usable(iteration, run_together(self._comm, _WHERE, find)):
                    yield checkpoint

    def _gather(self, iteration: int, spoiled: Container[Job | None]) -> list[Checkpoint]:
        """Find the files of checkpoints that are not spoiled, on all hosts. Collective."""
        readable = {}
        for rank, number in self._present():
            if number == iteration:
                job, fault = self._label(iteration, rank)
                if job and not fault:
                    readable[rank] = job
        found: dict[Job, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for reader, jobs in enumerate(self._comm.allgather_obj(readable)):
            for rank, job in jobs.items():
                found[job][rank].append(reader)
        return [
            # A rank reads its own file if it can; the ranks divide the other files.
            Checkpoint(
                iteration,
                {
                    rank: rank if rank in able else able[rank % len(able)]
                    for rank, able in by_rank.items()
                },
            )
            for job, by_rank in sorted(found.items())
            if job not in spoiled and len(by_rank) == job.n_ranks == 1 + max(by_rank)
        ]

    def _damage_of_others(self, checkpoint: Checkpoint) -> str:
        """Examine the files that this rank reads for others."""
        for writer, reader in checkpoint.readers.items():
            if reader == self._comm.rank != writer:
                path = self.path(checkpoint.iteration, writer)
                if damage := find_damage(path):
                    return f"{path}: {damage}"
        return ""

    def _are_usable(self, iteration: int, fault: str) -> bool:
        return is_usable_everywhere(self._comm, f"checkpoint {self.path(iteration)}", fault)

    def _examine(self, iteration: int) -> tuple[Job | None, str]:
        """Return the job that wrote this rank's file, if it exists, and what is wrong with it."""
        path = self.path(iteration)
        if not path.exists():
            return None, ""
        job, fault = self._label(iteration, self._comm.rank)
        return job, find_damage(path) or fault

    def _label(self, iteration: int, rank: int) -> tuple[Job | None, str]:
        try:
            with open_npz(self.path(iteration, rank)) as arrays:
                label = arrays.read_for(LABEL, np.zeros(4, np.int64))
            n_ranks, *place, run = label.astype(np.int64, casting="safe").tolist()
        except (OSError, KeyError, TypeError, ValueError):
            return None, "it is not a checkpoint"
        if place != [rank, iteration]:
            return None, f"its label says rank and iteration {place}"
        return Job(n_ranks, run), ""

    def _present(self) -> set[tuple[int, int]]:
        """Return the rank and iteration of every file that this rank sees."""
        pattern = re.compile(rf"{re.escape(self._name)}\.([0-9]+)\.([0-9]+)")
        found = (pattern.fullmatch(file.name) for file in self._beginning_with(f"{self._name}."))
        return {(int(name[1]), int(name[2])) for name in found if name}

    def _beginning_with(self, prefix: str) -> list[Path]:
        if not self.folder.is_dir():
            return []
        return [Path(entry) for entry in os.scandir(self.folder) if entry.name.startswith(prefix)]
