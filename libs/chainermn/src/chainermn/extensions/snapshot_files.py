"""The files of snapshots: which there are, and from which a run resumes."""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import chainer

from chainer_compat.npz import open_npz
from chainermn.agreement import run_together
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.extensions.npz_files import find_damage, is_usable_everywhere
from chainermn.extensions.snapshot_contents import About, about, difference
from chainermn.notes import note_once

_WHERE = "multi_node_snapshot"


class Found(NamedTuple):
    """A file of a snapshot."""

    #: When it was written, in seconds.
    time: float
    #: What it says about itself; None if it cannot be read.
    about: About | None


class SnapshotFiles:
    """The files ``{filename}.{rank}`` in a folder, of the ranks that write.

    Parameters
    ----------
    comm : CommunicatorBase
        Communicator of all ranks.
    filename : str or callable
        Chainer's format of the names, without the rank.
    is_master : bool
        Whether this rank writes.
    label : str, optional
        The settings of this run.
    """

    def __init__(
        self,
        comm: CommunicatorBase,
        filename: str | Callable[[chainer.training.Trainer], str],
        is_master: bool,
        label: str | None,
    ) -> None:
        self._comm, self._filename, self._is_master = comm, filename, is_master
        self._label = label

    def remove_unfinished(self, folder: Path) -> None:
        """Remove the unfinished snapshots of a job that was killed."""
        if self._is_master and folder.is_dir():
            # Chainer writes snapshots in folders with these names.
            unfinished = re.compile(rf"tmp{self._pattern()}.*")
            for path in folder.iterdir():
                if unfinished.fullmatch(path.name) and path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)

    def newest(self, folder: Path) -> str | None:
        """Return the name, without the rank, of the snapshot to resume from. Collective.

        This is the one with the highest iteration of those with the same settings, that all ranks
        can load; without settings, the one written last.

        Raises
        ------
        ValueError
            On every rank, if those that there are have other settings.
        """
        own = run_together(
            self._comm, _WHERE, lambda: dict(self._files(folder)) if self._is_master else None
        )
        by_rank = {
            rank: found
            for rank, found in enumerate(self._comm.allgather_obj(own))
            if found is not None
        }
        common = set.intersection(*map(set, by_rank.values()))
        if any(by_rank.values()) and not common and self._comm.rank == 0:
            counts = ", ".join(f"{len(found)} by rank {rank}" for rank, found in by_rank.items())
            warnings.warn(
                f"{_WHERE}: nothing is loaded from {folder}, because the ranks that write now "
                f"have no snapshot in common there: {counts}. Was the number of ranks different, "
                "or replica_sets? With replica_sets=[], any number of ranks can load a snapshot",
                stacklevel=4,
            )
        passed_over = ""
        for name in self._in_order(by_rank, common):
            path = folder / f"{name}.{self._comm.rank}"
            find = partial(find_damage, path) if self._is_master else str
            fault = run_together(self._comm, _WHERE, find)
            if not is_usable_everywhere(self._comm, f"snapshot {path}", fault):
                continue
            compare = partial(difference, path, self._label) if self._is_master else str
            differs = run_together(self._comm, _WHERE, compare)
            found = next(filter(None, self._comm.allgather_obj(differs)), "")
            if not found:
                return name
            passed_over = passed_over or found
        if passed_over:
            raise ValueError(
                f"{passed_over}. Use the same settings to resume that run, or a folder other than "
                f"{folder} for a new one"
            )
        return None

    def _in_order(self, by_rank: Mapping[int, Mapping[str, Found]], names: set[str]) -> list[str]:
        """Return names of snapshots, the best to resume from first, after damaged ones."""
        # The times of the first set alone: clocks of other hosts may differ.
        first = by_rank[min(by_rank)]
        damaged = {name for name in names if any(f[name].about is None for f in by_rank.values())}

        def by_time(name: str) -> tuple[float, list[int]]:
            return first[name].time, _numbers(name)

        def by_iteration(name: str) -> tuple[bool, int, Any]:
            settings, iteration = first[name].about or About(None, None)
            return self._label in (None, settings), iteration or 0, by_time(name)

        rank = by_time if self._label is None else by_iteration
        ordered = sorted(names - damaged, key=rank, reverse=True)
        if self._label is None and ordered and self._comm.rank == 0:
            furthest = max(ordered, key=by_iteration)
            latest, most = by_iteration(ordered[0])[1], by_iteration(furthest)[1]
            if latest < most:
                note_once(
                    f"{_WHERE}: without settings, the snapshot written last is loaded, "
                    f"{ordered[0]} of iteration {latest}, but {furthest} is of iteration {most}. "
                    "If its time is that of a copy, give multi_node_snapshot settings"
                )
        return sorted(damaged, key=by_time, reverse=True) + ordered

    def _files(self, folder: Path) -> Iterator[tuple[str, Found]]:
        pattern = re.compile(self._pattern())
        for file in folder.iterdir() if folder.is_dir() else ():
            if (matching := pattern.fullmatch(file.name)) and file.is_file():
                try:
                    with open_npz(file) as saved:
                        described = about(saved)
                except OSError:
                    described = None
                yield matching[1], Found(file.stat().st_mtime, described)

    def _pattern(self) -> str:
        """Return a pattern for the names of this rank's snapshots; group 1 lacks the suffix."""
        if callable(self._filename):
            raise TypeError("autoload needs a snapshot whose filename is a string")
        stem = ".*".join(map(re.escape, re.split(r"\{.*\}", self._filename)))
        return rf"({stem})\.{self._comm.rank}"


def _numbers(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name)]
