"""A barrier in shared memory, where ranks that wait long leave the cores to the others."""

from __future__ import annotations

import mmap
import os
import platform
import time
from collections.abc import Callable

from chainermn.transport.host.futex import Futex
from chainermn.transport.host.sharing import LINE_BYTES

#: On these processors, other cores see a core's writes in the order in which it made them.
KEEPS_ORDER = platform.machine() in ("x86_64", "AMD64", "i686")

_LOOKS_BEFORE_YIELDING = 64
#: Number of looks after which a waiting rank sleeps.
LOOKS_BEFORE_SLEEPING = 4096
#: Seconds after which a sleeping rank looks again, even if no other rank wakes it.
SECONDS_OF_SLEEP = 0.05
_SECONDS_WITHOUT_FUTEX = 5e-5

# Words of the first line, 8 bytes each. A rank may already sleep at the next barrier while another
# still writes that it sleeps at this one, so there are two words for sleepers.
_COMPLETED, _SLEEPERS = 0, (1, 2)


def bytes_needed(size: int) -> int:
    """Return the size of the memory for a barrier of ``size`` ranks."""
    return (size + 1) * LINE_BYTES


class Barrier:
    """A barrier among ranks of one host. Each rank writes one line of its memory.

    Parameters
    ----------
    memory : mmap
        Memory that the ranks share. It begins with `bytes_needed` bytes that are initially zero.
    rank, size : int
        This rank, and the number of ranks.
    n_cores : int
        Number of cores on which the ranks run. If there are more ranks than cores, waiting ranks
        sleep immediately: spinning would take cores from the ranks they wait for.
    meanwhile : callable
        Function that a rank calls now and then while it waits long.
    """

    def __init__(
        self,
        memory: mmap.mmap,
        rank: int,
        size: int,
        n_cores: int,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> None:
        self._meanwhile = meanwhile
        self._words = memoryview(memory)[: bytes_needed(size)].cast("q")
        stride = LINE_BYTES // self._words.itemsize
        self._own = (rank + 1) * stride
        self._others = [(other + 1) * stride for other in range(size) if other != rank]
        self._looks = (
            (_LOOKS_BEFORE_YIELDING, LOOKS_BEFORE_SLEEPING) if size <= n_cores else (1, 1)
        )
        self._futex = Futex.at(memory, _COMPLETED * self._words.itemsize)
        self._arrivals = 0

    def arrive(self) -> None:
        """Tell the others that this rank has arrived."""
        self._arrivals += 1
        self._words[self._own] = self._arrivals

    def Test(self) -> bool:
        """Tell whether the others have arrived as often as this rank."""
        words, arrivals = self._words, self._arrivals
        if words[_COMPLETED] >= arrivals:
            return True
        for other in self._others:
            if words[other] < arrivals:
                return False
        words[_COMPLETED] = arrivals
        if self._futex and words[_SLEEPERS[arrivals % 2]] >= arrivals:
            self._futex.wake()
        return True

    def Wait(self) -> None:
        """Wait for the others: spin for some microseconds, then yield the core, then sleep."""
        yielding, sleeping = self._looks
        looks = 0
        while not self.Test():
            looks += 1
            if looks > sleeping:
                self.sleep()
                self._meanwhile()
            elif looks > yielding:
                os.sched_yield()

    def sleep(self) -> None:
        """Sleep until the last rank has arrived, or for a limited time."""
        if self._futex is None:
            time.sleep(_SECONDS_WITHOUT_FUTEX)
            return
        words = self._words
        completed = words[_COMPLETED]
        words[_SLEEPERS[self._arrivals % 2]] = self._arrivals
        os.sched_yield()  # after a system call, the others see this rank's writes
        if not self.Test():
            self._futex.wait(completed, SECONDS_OF_SLEEP)
