"""The caller's side of `chainermn.launch.run`: ranks that make one call."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import IO, Any

from chainermn.launch.connections import Listener, hang_up
from chainermn.launch.failure import Failure
from chainermn.launch.output import Output
from chainermn.launch.search_path import SearchPath

#: Seconds that all ranks get to connect.
START_LIMIT = 120.0
# Seconds between two looks at mpiexec.
_PERIOD = 0.1
# Seconds in which other ranks may fail in the same way, so that the error names the lowest one.
_SECONDS_FOR_OTHERS = 0.2
# Seconds that mpiexec gets to report how a rank ended.
_SECONDS_FOR_A_REASON = 5.0
# Seconds that mpiexec gets to end after the caller has hung up.
_SECONDS_FOR_THE_END = 30.0
#: Seconds that ranks get to leave MPI after the function has returned.
SECONDS_TO_LEAVE = 60.0
#: Seconds to wait for the rest of the output after mpiexec has ended: processes that the function
#: left behind may print without end.
SECONDS_FOR_OUTPUT = 5.0
# Seconds that ranks get to end themselves after the caller has hung up.
_SECONDS_TO_END = 1.0

# Reports of MPICH and Open MPI on a process killed by a signal, and of Open MPI on an exit code.
_SIGNAL = re.compile(r"PID (\d+).*?(?:\(|on\s+)signal\s+(\d+)", re.DOTALL)
_EXIT_CODE = re.compile(r"Exit code:\s+(\d+)")


class Ranks:
    """Makes the same call on all ranks; a context manager that ends them.

    Everything runs in the calling thread, so that an interrupt works at any time and output
    appears where the caller's own does.

    Parameters
    ----------
    size : int
        Number of ranks.
    listener : Listener
        Listener that accepts the connections of the ranks.
    mpiexec : subprocess.Popen
        Process that has started, or is about to start, `chainermn.launch.worker` on each rank.
    """

    def __init__(self, size: int, listener: Listener, mpiexec: subprocess.Popen[bytes]) -> None:
        self._size, self._listener, self._mpiexec = size, listener, mpiexec
        self._printed = b""  # by mpiexec
        self._connections: dict[int, Connection] = {}
        self._outputs: dict[Connection, Output] = {}
        self._pids: dict[int, int] = {}
        self._results: dict[int, bytes] = {}
        self._failures: dict[int, Failure] = {}
        self._dead: list[int] = []
        self._is_over = False
        self._selector = selectors.DefaultSelector()
        self._listen_to(listener, self._accept)
        assert mpiexec.stdout is not None
        self._listen_to(mpiexec.stdout, functools.partial(self._hear_mpiexec, mpiexec.stdout))

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        self._selector.close()
        self._hang_up()
        left, deadline = [*self._connections.values()], time.monotonic() + _SECONDS_TO_END
        while left and (gone := wait(left, max(0.0, deadline - time.monotonic()))):
            left = [connection for connection in left if connection not in gone]
        for connection in (*self._connections.values(), *self._outputs):
            connection.close()

    def call(self, call: bytes) -> list[Any]:
        """Let each rank make a call; return the results in rank order.

        Raises
        ------
        Exception
            If ranks raise: the exception of the lowest one.
        RuntimeError
            If a rank ends in another way.
        """
        self._serve(lambda: self._has_started() or bool(self._dead), START_LIMIT)
        if not self._has_started():
            self._end()
            raise self._error_of_start()
        message = pickle.dumps((SearchPath.of_this_process(), call))
        for connection in self._connections.values():
            with contextlib.suppress(OSError):  # the rank has died, which we notice below
                connection.send_bytes(message)
        self._serve(self._is_decided, float("inf"))
        if self._failures:
            self._serve(lambda: len(self._failures) == self._size, _SECONDS_FOR_OTHERS)
            self._end()  # output of a rank may arrive after its exception
            first = min(self._failures)
            raise self._failures[first].as_exception(first)
        missing = self._dead or sorted({*range(self._size)} - {*self._results})
        if missing:
            self._serve(self._has_ended, _SECONDS_FOR_A_REASON)
            self._end()  # before MPI is initialized, MPICH's mpiexec keeps running
            raise self._error_of_death(missing[0])
        self._serve(self._has_ended, SECONDS_TO_LEAVE)
        if self._mpiexec.poll() != 0:
            raise self._error_of_leaving()
        sys.stderr.write(self._printed.decode(errors="replace"))
        return [self._result(rank) for rank in range(self._size)]

    def _hang_up(self) -> None:
        """Let the ranks end themselves."""
        for connection in self._connections.values():
            hang_up(connection)

    def _end(self) -> None:
        """Let the ranks end themselves, and read the rest of their output and mpiexec's."""
        self._is_over = True
        self._hang_up()
        self._serve(self._has_ended, _SECONDS_FOR_THE_END)

    def _listen_to(self, source: Any, act: Callable[[], None]) -> None:
        self._selector.register(source, selectors.EVENT_READ, act)

    def _serve(self, is_done: Callable[[], bool], seconds: float) -> None:
        """Handle events until a condition is true, mpiexec has ended, or the time is up."""
        deadline, has_ended = time.monotonic() + seconds, False
        while not is_done() and time.monotonic() < deadline:
            if not has_ended and self._mpiexec.poll() is not None:
                deadline = min(deadline, time.monotonic() + SECONDS_FOR_OUTPUT)
                has_ended = True
            # Everything printed before mpiexec ended has arrived by now.
            ready = self._selector.select(_PERIOD)
            for key, _ in ready:
                key.data()
            self._accept()  # also drops peers that send nothing
            if has_ended and not ready:
                return

    def _has_started(self) -> bool:
        return len(self._connections) == self._size

    def _is_decided(self) -> bool:
        return bool(self._failures or self._dead) or len(self._results) == self._size

    def _has_ended(self) -> bool:
        is_read = self._mpiexec.stdout not in self._selector.get_map()
        return self._mpiexec.poll() is not None and is_read and not self._outputs

    def _accept(self) -> None:
        for connection, (rank, purpose, _, pid) in self._listener.accept():
            if purpose == "call":
                self._connections[rank], self._pids[rank] = connection, pid
                if self._is_over:  # the rank connected too late
                    hang_up(connection)
                self._listen_to(connection, functools.partial(self._hear, rank, connection))
            else:
                self._outputs[connection] = Output(rank, purpose)
                self._listen_to(connection, functools.partial(self._relay, connection))

    def _hear(self, rank: int, caller: Connection) -> None:
        try:
            outcome = caller.recv()
        except (EOFError, OSError):
            self._selector.unregister(caller)
            if rank not in self._results and rank not in self._failures:
                self._dead.append(rank)
        else:
            kept: dict[int, Any] = (
                self._failures if isinstance(outcome, Failure) else self._results
            )
            kept[rank] = outcome

    def _relay(self, connection: Connection) -> None:
        data = _read(connection)
        self._outputs[connection].write(data)
        if not data:
            self._selector.unregister(connection)
            self._outputs.pop(connection).close()
            connection.close()

    def _hear_mpiexec(self, pipe: IO[bytes]) -> None:
        data = _read(pipe)
        self._printed += data
        if not data:
            self._selector.unregister(pipe)

    def _result(self, rank: int) -> Any:
        try:
            return pickle.loads(self._results[rank])  # noqa: S301  # from a rank of ours
        except Exception as error:
            raise RuntimeError(
                f"the result of rank {rank} cannot be unpickled by the caller: "
                f"{type(error).__name__}: {error}. Return numbers, arrays or strings instead"
            ) from error

    def _error_of_start(self) -> RuntimeError:
        missing = sorted({*range(self._size)} - {*self._connections})
        return RuntimeError(
            f"{len(missing)} of {self._size} ranks did not start: {missing}; mpiexec "
            f"{self._how_mpiexec_ended()} and printed: {self._words()}"
        )

    def _error_of_leaving(self) -> RuntimeError:
        how = self._how_mpiexec_ended(f"within {SECONDS_TO_LEAVE:.0f} s")
        return RuntimeError(
            f"the function returned on all {self._size} ranks, but then mpiexec {how}. Check that "
            f"every message that was sent is also received. mpiexec printed: {self._words()}"
        )

    def _how_mpiexec_ended(self, limit: str = "by itself") -> str:
        code = self._mpiexec.poll()
        return f"has not ended {limit}" if code is None else f"ended with exit code {code}"

    def _error_of_death(self, rank: int) -> RuntimeError:
        words = self._words()
        signals = signals_in(words)
        # MPICH may report another rank, which it killed itself, with SIGKILL.
        others = (number for number in signals.values() if number != signal.SIGKILL)
        number = signals.get(self._pids[rank], next(others, None))
        if number is not None:
            how = f"was killed by signal {number} ({name_of(number)})"
        elif found := _EXIT_CODE.search(words):
            how = f"ended with exit code {found[1]}"
        elif not self._printed and self._mpiexec.poll():  # MPICH returns the rank's exit code
            how = f"ended with exit code {self._mpiexec.returncode}"
        else:
            how = "was killed, crashed or called os._exit"
        return RuntimeError(
            f"rank {rank} of {self._size} {how} before the function returned; "
            "its output may say why"
        )

    def _words(self) -> str:
        """Return the text that mpiexec printed."""
        return self._printed.decode(errors="replace").strip() or "nothing"


def signals_in(report: str) -> dict[int, int]:
    """Return the signals that killed processes, by PID, as MPICH or Open MPI reports them."""
    return {int(pid): int(number) for pid, number in _SIGNAL.findall(report)}


def name_of(number: int) -> str | None:
    """Return the name of a signal."""
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no names
        return signal.strsignal(number)


def _read(source: Any) -> bytes:
    try:
        return os.read(source.fileno(), 1 << 16)
    except OSError:  # the other end has been killed
        return b""
