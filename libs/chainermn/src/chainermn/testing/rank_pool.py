"""Ranks that keep running between tests.

Starting ``mpiexec`` and importing Chainer takes a second or more per rank, a test often only
milliseconds. A pool starts its ranks once and gives them one test after another. If a test fails
on any rank, messages may still be on their way, so the next test gets a fresh pool.

Each rank is a pytest session (`rank_worker`) with a Unix socket to the pool, which notices at once
if a rank dies, whatever ``mpiexec`` does.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from chainermn.testing.mpiexec import Job

START_LIMIT = 120.0
# Seconds for the other ranks to finish once one has failed; those that need it never will.
GRACE_AFTER_FAILURE = 2.0
# Seconds for a rank to write its stacks; the main thread comes last, and may be cut off.
STACK_LIMIT = 5.0
_ENDS_OF_STACKS = ("in _run_module_as_main", "...")


@dataclass
class RankResult:
    """Result of one test on one rank.

    Attributes
    ----------
    rank : int
    status : str
        ``'passed'``, ``'skipped'``, ``'failed'``, ``'hung'`` (still running after its time limit)
        or ``'died'`` (the process is gone).
    reports : list of dict
        Serialised pytest reports, one per phase; empty for ``'hung'`` and ``'died'``.
    stack : str
        For ``'hung'``: stacks of all threads.
    """

    rank: int
    status: str
    reports: list[dict[str, Any]] = field(default_factory=list)
    stack: str = ""


class RankPoolError(RuntimeError):
    """The ranks could not be started."""


class RankPool:
    """Processes under one ``mpiexec`` that run the tests that they are given.

    Parameters
    ----------
    ranks : int
        Number of ranks.
    pytest_arguments : sequence of str
        Arguments of the pytest session on each rank, including the test files.
    """

    def __init__(self, ranks: int, pytest_arguments: Sequence[str]) -> None:
        self.ranks = ranks
        self._directory = Path(tempfile.mkdtemp(prefix="mpi"))
        listener = socket.socket(socket.AF_UNIX)
        address = self._directory / "socket"
        with contextlib.chdir(address.parent):  # a full path may be too long for a socket
            listener.bind(address.name)
        listener.listen(ranks)
        worker = ["-m", "chainermn.testing.rank_worker"]
        self._job = Job(ranks, [*worker, address, *pytest_arguments])
        self._connections: dict[Connection, int] = {}
        self._pids: dict[int, int] = {}
        try:
            self._accept(listener)
        except BaseException:
            self.kill()
            raise
        finally:
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        deadline = time.monotonic() + START_LIMIT
        listener.settimeout(0.2)
        while len(self._connections) < self.ranks:
            try:
                accepted, _ = listener.accept()
            except TimeoutError:
                if self._job.process.poll() is None and time.monotonic() < deadline:
                    continue
                raise self._start_error("did not connect") from None
            connection = Connection(accepted.detach())
            try:
                rank, self._pids[rank] = connection.recv()
            except EOFError:
                raise self._start_error("ended at once") from None
            self._connections[connection] = rank
        for connection, rank in self._connections.items():
            ready = connection.poll(max(0.0, deadline - time.monotonic()))
            try:
                if not ready or connection.recv() != "ready":
                    raise EOFError
            except EOFError:
                raise self._start_error(f"(rank {rank}) could not collect the tests") from None

    def _start_error(self, what: str) -> RankPoolError:
        stdout, stderr = self._job.output()
        return RankPoolError(
            f"a rank of {self.ranks} {what}; output of the job:\n{stdout}\n{stderr}"
        )

    def run(self, nodeid: str, limit: float) -> list[RankResult]:
        """Run one test, for at most ``limit`` seconds; return the result of each rank in order."""
        results: dict[int, RankResult] = {}
        for connection, rank in self._connections.items():
            try:
                connection.send((nodeid, limit))
            except OSError:
                results[rank] = RankResult(rank, "died")
        deadline = time.monotonic() + (GRACE_AFTER_FAILURE if results else limit)
        while len(results) < self.ranks:
            waiting = [c for c, rank in self._connections.items() if rank not in results]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in waiting:
                if connection not in ready:
                    continue
                rank = self._connections[connection]
                try:
                    status, reports = connection.recv()
                    results[rank] = RankResult(rank, status, reports)
                except (EOFError, OSError):
                    results[rank] = RankResult(rank, "died")
                if results[rank].status in ("failed", "died"):
                    deadline = min(deadline, time.monotonic() + GRACE_AFTER_FAILURE)
        for rank in set(range(self.ranks)) - set(results):
            results[rank] = RankResult(rank, "hung", stack=self._stack_of(rank))
        return [results[rank] for rank in range(self.ranks)]

    def _stack_of(self, rank: int) -> str:
        """Return the stacks of a rank that is stuck, perhaps in C code."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pids[rank], signal.SIGUSR1)
        path = self._directory / f"stack{rank}"
        deadline = time.monotonic() + STACK_LIMIT
        stack = ""
        while time.monotonic() < deadline and not stack.rstrip().endswith(_ENDS_OF_STACKS):
            time.sleep(0.02)
            with contextlib.suppress(FileNotFoundError):
                stack = path.read_text(errors="replace")
        return _without_pytest(stack) or "(it does not react to a signal either)"

    def close(self) -> str:
        """Let the ranks end by themselves; return what went wrong, or ``''``."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send(None)
        result = self._job.wait(timeout=60)
        self._clear()
        if result.timed_out:
            return f"{self.ranks} ranks did not end after their last test\n{result.stderr}"
        if result.returncode or result.left_behind:
            return (
                f"after their last test {self.ranks} ranks ended with exit code "
                f"{result.returncode}, left behind: {result.left_behind}\n{result.stderr}"
            )
        return ""

    def kill(self) -> str:
        """Kill the ranks; return output of them and ``mpiexec`` that pytest did not capture."""
        output = self._job.kill()
        self._clear()
        return "\n".join(filter(None, (text.strip() for text in output)))

    def _clear(self) -> None:
        for connection in self._connections:
            connection.close()
        shutil.rmtree(self._directory, ignore_errors=True)


def _without_pytest(stacks: str) -> str:
    """Leave out the frames of pytest and of the worker below the test."""
    kept, inside = [], True
    for line in stacks.splitlines():
        if "_pytest" in line and line.startswith("  File"):
            inside = False
        elif not line.startswith("  "):
            inside = True
        if inside:
            kept.append(line)
    return "\n".join(kept)
