"""A stand-in for CuPy's memory pool that finds memory reused too early.

CuPy's pool gives freed memory to the next array on the stream that allocated it, immediately,
even if other streams are still using it. Here, no memory is really reused. Instead, each array
takes a block of its size from its stream's free list, with a record of which streams have used the
block, and when. If a stream has, and the new array's stream has not waited for it, this is a race,
which a real GPU would lose now and then.

Whatever a host thread has waited for is known to be done by all that the thread starts later.
"""

from __future__ import annotations

import bisect
import math
import threading
from collections import defaultdict
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np

#: How much work each stream has been given so far.
Clock = dict[Hashable, int]

_UNIT = 512  # bytes


class Block:
    """Memory for one array."""

    def __init__(self, memory: StreamMemory, owner: Hashable, n_bytes: int) -> None:
        self.owner, self.n_bytes, self.used = owner, n_bytes, Clock()
        # Kept forever, since the stand-in may do a stream's work after the memory was freed.
        raw = np.empty(n_bytes + _UNIT, np.uint8)
        memory.kept.append(raw)
        self.address = raw.ctypes.data + -raw.ctypes.data % _UNIT
        self._memory = memory
        self.__array_interface__ = {
            "shape": (n_bytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }

    def __del__(self) -> None:
        self._memory.free(self)


class StreamMemory:
    """The pool, and the order of work on streams.

    Attributes
    ----------
    races : list of str
        What could have gone wrong on a GPU.
    """

    def __init__(self) -> None:
        self.races: list[str] = []
        self.kept: list[np.ndarray] = []
        self._known: defaultdict[Hashable, Clock] = defaultdict(Clock)
        self._host: defaultdict[int, Clock] = defaultdict(Clock)
        self._free: defaultdict[tuple[Hashable, int], list[Clock]] = defaultdict(list)
        self._addresses: list[int] = []
        self._in_use: dict[int, tuple[int, Clock]] = {}
        self._lock = threading.RLock()

    def empty(self, stream: Hashable, n: int, dtype: Any) -> np.ndarray:
        """Return a flat array from the pool for work on ``stream``."""
        n_bytes = n * np.dtype(dtype).itemsize
        if n_bytes == 0:
            return np.empty(n, dtype)
        with self._lock:
            block = Block(self, stream, math.ceil(n_bytes / _UNIT) * _UNIT)
            free = self._free[stream, block.n_bytes]
            if free:
                self._check(stream, free.pop(), "reuses memory")
            self._in_use[block.address] = block.n_bytes, block.used
            bisect.insort(self._addresses, block.address)
        return np.asarray(block)[:n_bytes].view(dtype)

    def free(self, block: Block) -> None:
        """Free a block for the next array of its stream."""
        with self._lock:
            del self._in_use[block.address]
            self._addresses.remove(block.address)
            self._free[block.owner, block.n_bytes].append(block.used)
            if block.owner is None:
                # The training thread may make the next array now.
                self._check(None, block.used, "may reuse memory")

    def use(self, stream: Hashable, *addresses: int) -> None:
        """Give ``stream`` work that uses the memory at these addresses."""
        with self._lock:
            known = self._known_to(stream)
            known[stream] = now = known.get(stream, 0) + 1
            for address in addresses:
                index = bisect.bisect(self._addresses, address) - 1
                start = self._addresses[index] if index >= 0 else address
                n_bytes, used = self._in_use.get(start, (0, known))
                if address < start + n_bytes:
                    used[stream] = now

    def now(self, stream: Hashable) -> Clock:
        """Return what is done once ``stream`` has done all its work."""
        with self._lock:
            self.use(stream)
            return Clock(self._known[stream])

    def wait(self, stream: Hashable, until: Clock) -> None:
        """Make later work on ``stream`` wait until this is done."""
        with self._lock:
            _merge(self._known[stream], until)

    def host_waited(self, until: Clock) -> None:
        """Note that this host thread has waited until this was done."""
        with self._lock:
            _merge(self._host[threading.get_ident()], until)

    def _known_to(self, stream: Hashable) -> Clock:
        """Return what is done before the next work that this thread gives to ``stream``."""
        _merge(self._known[stream], self._host[threading.get_ident()])
        return self._known[stream]

    def _check(self, stream: Hashable, used: Mapping[Hashable, int], what: str) -> None:
        known = self._known_to(stream)
        late = [other for other, when in used.items() if known.get(other, 0) < when]
        if late:
            self.races.append(f"{_name(stream)} {what} that {_name(late[0])} may still use")


def _merge(clock: Clock, other: Clock) -> None:
    for stream, when in other.items():
        clock[stream] = max(clock.get(stream, 0), when)


def _name(stream: Hashable) -> str:
    return "the default stream" if stream is None else "a stream of its own"
