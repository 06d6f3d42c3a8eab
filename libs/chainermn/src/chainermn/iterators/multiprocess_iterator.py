"""Chainer's MultiprocessIterator, for ranks: its workers wait less, and end with their rank."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.sharedctypes import RawArray
from typing import Any

import chainer
from chainer.iterators import _statemachine, multiprocess_iterator

from chainermn.process.workers import is_worker, set_up_worker

# Batches that workers read at a time. Chainer lets them begin the next one only when all of one
# has been read and copied, and meanwhile some of them wait.
_IN_FLIGHT = 3

# They ask a rank to stop, and may be sent to every process of a job.
_FOR_RANKS = (signal.SIGUSR1, signal.SIGUSR2)


def start_forkserver(preload: Sequence[str] = ("__main__", "chainer", "PIL.Image")) -> None:
    """Start the process of which all workers of this rank will be copies.

    Call it before `create_communicator`: what MPI has set up in a process must not be copied into
    another one, so a rank must not fork once MPI is initialised.

    Workers ignore SIGUSR1 and SIGUSR2, which ask a rank to stop; see `StopOnSignal`.

    Parameters
    ----------
    preload : sequence of str
        Modules that take long to import, so that workers find them there. Those that are not
        installed are left out.
    """
    multiprocessing.set_start_method("forkserver", force=True)
    multiprocessing.set_forkserver_preload(list(preload))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_RANKS)  # workers inherit it
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class MultiprocessIterator(chainer.iterators.MultiprocessIterator):
    """Reads examples in worker processes, several batches ahead.

    It takes and does what ``chainer.iterators.MultiprocessIterator`` does, with two differences.
    Workers begin with the next batches while the last examples of one are still being read, so
    none of them waits; this takes shared memory for three batches. And they end with their
    rank, in whatever way it ends, so a job whose rank is killed leaves none of them behind.

    Parameters
    ----------
    dataset : dataset
        The workers get it pickled, unless they are forked.
    batch_size : int
    repeat : bool
    shuffle : bool, optional
    n_processes : int, optional
        Workers: the rank's share of the cores of its host; by default all cores.
    n_prefetch : int
        Batches to have ready.
    shared_mem : int, optional
        Bytes of the largest example; by default those of the largest in the first batch.
    order_sampler : callable, optional
        Such as `create_distributed_sampler` returns.
    dataset_timeout : float, optional
        Seconds after which a ``TimeoutWarning`` is issued.
    maxtasksperchild : int, optional

    Notes
    -----
    Under MPI, call `start_forkserver` first of all.
    """

    def _initialize_loop(self) -> None:
        self._comm = multiprocess_iterator._Communicator(self.n_prefetch, self.dataset_timeout)
        self.reset()
        self._prefetch_loop = _Loop(
            _ForWorkers(self.dataset),
            self.batch_size,
            self.repeat,
            self.n_processes,
            self.n_prefetch,
            self.shared_mem,
            self._comm,
            self.order_sampler,
            self._interruption_testing,
            self._maxtasksperchild,
        )


class _ForWorkers:
    """A dataset that sets up the workers that it arrives in."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._process = os.getpid()

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        self._set_up()  # here, if it has been forked
        return self._dataset[index]

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._set_up()

    def _set_up(self) -> None:
        if self._process != os.getpid():
            self._process = os.getpid()
            if is_worker():
                set_up_worker()


class _Loop(multiprocess_iterator._PrefetchLoop):
    """Thread that hands out the reading of several batches; each has a slot of shared memory."""

    def _allocate_shared_memory(self) -> None:
        self._pending: deque[tuple[int, Any, Any]] = deque()
        self._free = deque(range(_IN_FLIGHT))
        self.mem_bulk = None
        if not self.measure_required():
            self.mem_bulk = RawArray("b", _IN_FLIGHT * self.batch_size * self.mem_size)

    def _task(self) -> bool:
        status, state, reset_count = self._comm.check()
        if status == self._comm.STATUS_TERMINATE:
            return False
        if status == self._comm.STATUS_RESET:
            self.prefetch_state = state
            while self._pending:
                # Before another batch gets the slot, nobody may write there any more.
                if self._next() is None:
                    return False
        while self._free:
            self._request()
        found = self._next()
        if found is None:
            return False
        self._comm.put(*found, reset_count)
        return True

    def _request(self) -> None:
        self.prefetch_state, indices = _statemachine.iterator_statemachine(
            self.prefetch_state,
            self.batch_size,
            self.repeat,
            self.order_sampler,
            len(self.dataset),
        )
        slot, future = self._free.popleft(), None
        if indices is not None:
            places = range(slot * self.batch_size, (slot + 1) * self.batch_size)
            jobs = list(zip(places, indices, strict=False))
            future = self._pool.map_async(multiprocess_iterator._fetch_run, jobs)
        self._pending.append((slot, future, self.prefetch_state))

    def _next(self) -> tuple[Any, Any] | None:
        """Wait for the oldest batch; None if the iterator has been finalized."""
        slot, future, state = self._pending.popleft()
        batch = None
        while future is not None:
            try:
                packed = future.get(multiprocess_iterator._response_time)
            except multiprocessing.TimeoutError:
                if self._comm.is_terminated:
                    return None
            else:
                batch = [multiprocess_iterator._unpack(data, self.mem_bulk) for data in packed]
                break
        self._free.append(slot)
        return batch, state
