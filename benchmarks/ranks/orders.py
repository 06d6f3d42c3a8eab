"""The other end of `benchmarks.harness.Team`: what a rank is told to do, and what it answers."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

_RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK")
_SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")


def rank_and_size() -> tuple[int, int]:
    """Return what ``mpiexec`` says of this process, before MPI is initialised."""
    found = []
    for variables, default in ((_RANK_VARIABLES, 0), (_SIZE_VARIABLES, 1)):
        values = [os.environ[name] for name in variables if name in os.environ]
        found.append(int(values[0]) if values else default)
    rank, size = found
    return rank, size


class Orders:
    """Orders for this rank, which are waited for without taking a core."""

    def __init__(self, folder: Path) -> None:
        rank, _ = rank_and_size()
        self._orders = (folder / f"{rank}.commands").open()
        self._answers = (folder / f"{rank}.answers").open("w", buffering=1)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while (order := json.loads(self._orders.readline() or "null")) is not None:
            yield order

    def answer(self, measured: dict[str, Any]) -> None:
        self._answers.write(json.dumps(measured) + "\n")

    def obey(self, prepare: Callable[..., Step]) -> None:
        """Repeat steps as told; a turn begins with one that is not measured.

        Parameters
        ----------
        prepare : callable
            Given the options of a contestant, returns its step.
        """
        steps: dict[str, Step] = {}
        for order in self:
            name, repeat = order["name"], order["repeat"]
            try:
                step = steps.get(name) or steps.setdefault(name, prepare(**order["options"]))
            except Exception as error:
                self.answer({"error": f"{type(error).__name__}: {error}"})
                continue
            sent_before = bytes_sent()
            step()  # finds the caches, and the cores, as the contestant before has left them
            start = time.perf_counter()
            for _ in range(repeat):
                more = step()
            seconds = (time.perf_counter() - start) / repeat
            if isinstance(step, Pipelined):
                step.settle()
            sent = (bytes_sent() - sent_before) // (repeat + 1)
            self.answer({"seconds": seconds, "sent": sent, **(more or {})})


@dataclass(frozen=True)
class Pipelined:
    """A step that leaves something under way; turns end when that is over."""

    step: Callable[[], None]
    settle: Callable[[], None]

    def __call__(self) -> None:
        self.step()


#: May return what else is to be answered.
Step: TypeAlias = "Pipelined | Callable[[], dict[str, Any] | None]"


def bytes_sent() -> int:
    """Return what the network interfaces of this host have counted, without loopback."""
    total = 0
    for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]:
        name, counts = line.split(":")
        if name.strip() != "lo":
            total += int(counts.split()[8])
    return total
