"""Where the processes of a job waited for the GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

#: Number of iterations until kernels are compiled and memory is allocated.
FIRST = 5
#: Calls that CuPy makes to get more memory, or a kernel for the first time.
GROWING = ("cudaMalloc", "cudaHostAlloc", "cuModuleLoadData")


@dataclass(frozen=True)
class Counts:
    """What a process has done on its GPU."""

    #: Kernels launched, those of graphs included.
    launches: int
    #: Captures that gave a graph.
    captures: int
    #: Launches of graphs.
    replays: int
    #: Kernels launched by graphs.
    replayed: int


@dataclass(frozen=True)
class Wait:
    """One call in which the host waits for the GPU."""

    #: The CUDA function.
    call: str
    bytes: int
    #: What the trainer does: ``update``, the name of an extension, or of a thread beside it.
    phase: str
    #: Number of finished iterations; -1 before there is a trainer.
    iteration: int
    rank: int
    #: The lines of Python outside CuPy, the innermost first.
    stack: tuple[str, ...]
    #: Whether the thread was capturing.
    in_capture: bool
    #: So far.
    counts: Counts

    @property
    def line(self) -> str:
        """Return the line that waits, and the innermost of our lines that led to it."""
        own = next((line for line in self.stack if "site-packages" not in line), "")
        lines = [line.split("site-packages/")[-1] for line in (*self.stack[:1], own)]
        return " < ".join(dict.fromkeys(filter(None, lines)))


@dataclass(frozen=True)
class Waits:
    """All waits of a job."""

    waits: list[Wait]
    #: Iterations after which each rank began: more than 0 if it was resumed.
    started: dict[int, int]
    #: Number of iterations that each rank has finished, and what it has done in them.
    iterations: dict[int, int]
    counts: dict[int, Counts]

    def in_iterations(self) -> list[Wait]:
        """Return the waits in iterations themselves, after the `FIRST` ones."""
        return [each for each in self.waits if each.phase == "update" and self._is_late(each)]

    def recurring(self) -> list[Wait]:
        """Return the waits in iterations that are not for new memory or a new kernel."""
        return [each for each in self.in_iterations() if each.call not in GROWING]

    def in_captures(self) -> list[Wait]:
        """Return the waits, new memory and new kernels while the thread was capturing."""
        return [each for each in self.waits if each.in_capture]

    def between(self) -> list[Wait]:
        """Return the waits in what a trainer does between iterations."""
        others = [each for each in self.waits if each.phase not in ("", "update")]
        return [each for each in others if self._is_late(each)]

    def _is_late(self, wait: Wait) -> bool:
        return wait.iteration >= self.started.get(wait.rank, 0) + FIRST

    def table(self) -> str:
        """Return what the host waits for after the first iterations, by line."""
        lines = [
            f"rank {rank}: {self.iterations[rank]} iterations, {counts.launches} kernels"
            + (f", {counts.replayed} of them in graphs" if counts.replays else "")
            for rank, counts in sorted(self.counts.items())
        ]
        lines += [f"in iterations, after the first {FIRST}:", *show(self.in_iterations())]
        lines += ["between them:", *show(self.between())]
        return "\n".join(lines)


def show(waits: Sequence[Wait]) -> list[str]:
    """Return a line of text for each line of Python that waits: how often, and in which call."""
    found: dict[tuple[str, ...], list[Wait]] = {}
    for each in waits:
        found.setdefault((each.phase, each.call, each.line), []).append(each)
    return [
        f"{len(found[what]):6} in {len({each.iteration for each in found[what]})} iterations: "
        + ", ".join(what)
        for what in sorted(found)
    ] or ["     0"]


def read(folder: Path) -> Waits:
    """Read what the processes of a job have noted."""
    waits: list[Wait] = []
    started: dict[int, int] = {}
    iterations: dict[int, int] = {}
    counts: dict[int, Counts] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            note = json.loads(line)
            done = Counts(**note["counts"])
            wait = Wait(**note | {"stack": tuple(note["stack"]), "counts": done})
            iterations[wait.rank] = max(iterations.get(wait.rank, 0), wait.iteration)
            so_far = counts.get(wait.rank, done)
            counts[wait.rank] = done if done.launches >= so_far.launches else so_far
            if wait.phase == "update":
                started.setdefault(wait.rank, wait.iteration)
            if wait.call != "end":
                waits.append(wait)
    return Waits(waits, started, iterations, counts)
