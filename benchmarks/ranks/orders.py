"""A rank's side of `benchmarks.harness.Team`: read orders and answer them."""

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
    """Return rank and size from the variables of ``mpiexec``, before MPI is initialized."""
    found = []
    for variables, default in ((_RANK_VARIABLES, 0), (_SIZE_VARIABLES, 1)):
        values = [os.environ[name] for name in variables if name in os.environ]
        found.append(int(values[0]) if values else default)
    rank, size = found
    return rank, size


class Orders:
    """Orders for this rank. Waiting for them uses no processor time."""

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
        """Repeat steps as ordered. The first step of a turn is not measured if it is short.

        Parameters
        ----------
        prepare : callable
            Function that gets the options of a contestant and returns its step.
        """
        steps: dict[str, Step] = {}
        for order in self:
            name, repeat, n_before = order["name"], order["repeat"], order["before"]
            try:
                step = steps.get(name) or steps.setdefault(name, prepare(**order["options"]))
            except Exception as error:
                self.answer({"error": f"{type(error).__name__}: {error}"})
                continue
            if isinstance(step, Pipelined):
                n_before = max(n_before, 1)  # a step waits for work of the step before
            sent_before = bytes_sent()
            for _ in range(n_before):
                step()  # caches and cores are as the previous contestant left them
            start = time.perf_counter()
            for _ in range(repeat):
                more = step()
            times = step.times if isinstance(step, Repeated) else 1
            seconds = (time.perf_counter() - start) / (repeat * times)
            if isinstance(step, Pipelined):
                step.settle()
            sent = (bytes_sent() - sent_before) // ((n_before + repeat) * times)
            self.answer({"seconds": seconds, "times": times, "sent": sent, **(more or {})})


@dataclass(frozen=True)
class Pipelined:
    """A step that leaves work running, which ``settle`` finishes after the turn."""

    step: Callable[[], None]
    settle: Callable[[], None]

    def __call__(self) -> None:
        self.step()


@dataclass(frozen=True)
class Repeated:
    """A step that repeats after ``times`` calls, which are measured together."""

    step: Callable[[], None]
    times: int

    def __call__(self) -> None:
        for _ in range(self.times):
            self.step()


#: A step may return further figures for the answer.
Step: TypeAlias = "Pipelined | Repeated | Callable[[], dict[str, Any] | None]"


def bytes_sent() -> int:
    """Return how many bytes the network interfaces of this host have sent, without loopback."""
    total = 0
    for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]:
        name, counts = line.split(":")
        if name.strip() != "lo":
            total += int(counts.split()[8])
    return total
