"""Share memory between two processes, as between the ranks of a job.

They meet through pipes instead of MPI, so that a test can kill one of them, or put both in
namespaces of their own.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

from chainermn.transport.host import memory

N_BYTES = 1 << 16
# The flags of unshare(2).
FLAGS = {"user": 0x10000000, "pid": 0x20000000, "ipc": 0x08000000, "net": 0x40000000}


class Pair:
    """The part of a communicator that `share_memory` uses."""

    size = 2

    def __init__(self, rank: int, other: Connection) -> None:
        self.rank, self._other = rank, other

    def bcast(self, value: Any) -> Any:
        if self.rank:
            return self._other.recv()
        self._other.send(value)
        return value

    def Barrier(self) -> None:
        self._other.send(None)
        self._other.recv()


def start(connections: Sequence[Connection], rank: int, act: Callable[[Any], None]) -> int:
    """Fork a process that calls ``act`` and exits; return its process ID."""
    if child := os.fork():
        return child
    code = 1
    try:
        connections[1 - rank].close()
        act(Pair(rank, connections[rank]))
        code = 0
    except (EOFError, OSError):
        pass  # the other has been killed
    finally:
        os._exit(code)


def run_pair(acts: Sequence[Callable[[Any], None]]) -> list[int]:
    """Run two processes to their end; return their exit codes, negative for signals."""
    connections = Pipe()
    children = [start(connections, rank, act) for rank, act in enumerate(acts)]
    for connection in connections:
        connection.close()
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def kill_at(number: int) -> Callable[[Any], None]:
    """Return a function that shares memory, but is killed before its ``number``-th line there."""

    def act(comm: Any) -> None:
        left = number

        def look(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal left
            if frame.f_code.co_filename != memory.__file__:
                return None
            if event == "line":
                left -= 1
                if not left:
                    os.kill(os.getpid(), signal.SIGKILL)
            return look

        sys.settrace(look)
        assert isinstance(memory.share_memory(comm, N_BYTES), mmap.mmap)
        sys.settrace(None)

    return act


def kill_everywhere(folder: str, is_old: bool) -> dict[str, Any]:
    """Kill each of two processes at each line; return the line counts, and any files left over."""
    memory.DIRECTORY = folder
    if is_old:
        del os.memfd_create

    def share(comm: Any) -> None:
        memory.share_memory(comm, N_BYTES)

    counts, left = [], []
    for rank in (0, 1):
        number, codes = 0, [-signal.SIGKILL] * 2
        while codes[rank] == -signal.SIGKILL:
            number += 1
            acts = [kill_at(number), share] if rank == 0 else [share, kill_at(number)]
            codes = run_pair(acts)
            left += os.listdir(folder)
        assert codes == [0, 0], codes
        counts.append(number - 1)
    return {"lines": counts, "left": left}


def share_apart(namespaces: Sequence[str], user: int) -> list[str]:
    """Return what each of two processes gets in namespaces of its own."""
    ends = [Pipe(duplex=False) for _ in range(2)]

    def act(comm: Any) -> None:
        if user:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
        if namespaces:
            flags = sum(FLAGS[name] for name in namespaces)
            if ctypes.CDLL(None, use_errno=True).unshare(ctypes.c_int(flags)):
                ends[comm.rank][1].send(f"unshare: {os.strerror(ctypes.get_errno())}")
                os._exit(2)
        if "pid" in namespaces and (child := os.fork()):  # only children are in the namespace
            os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        got = memory.share_memory(comm, N_BYTES)
        if isinstance(got, mmap.mmap):
            got[comm.rank] = 7 + comm.rank
        comm.Barrier()
        ends[comm.rank][1].send(got if isinstance(got, str) else str(list(got[:3])))

    run_pair([act, act])
    return [end.recv() if end.poll() else "nothing" for end, _ in ends]


if __name__ == "__main__":
    function, arguments = sys.argv[1], json.loads(sys.argv[2])
    print(json.dumps(globals()[function](*arguments)))
