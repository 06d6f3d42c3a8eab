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
from chainer.iterators import multiprocess_iterator

from chainermn.process.workers import is_worker, set_up_worker, without_working_folder

# Number of batches that workers read at a time. Chainer's workers begin a batch only after the
# one before has been read and copied, so some of them wait.
_IN_FLIGHT = 3

# Signals that ask a rank to stop. Some launchers send them to every process of a job.
_FOR_RANKS = (signal.SIGUSR1, signal.SIGUSR2)


def start_forkserver(preload: Sequence[str] = ("__main__", "chainer", "PIL.Image")) -> None:
    """Start the process from which the workers of this rank will be forked.

    Call it before `create_communicator` if you use a ``MultiprocessIterator``. A rank itself must
    not fork after MPI is initialized, because the state of MPI must not be copied to another
    process. Workers ignore SIGUSR1 and SIGUSR2, which ask a rank to stop; see `StopOnSignal`.

    Parameters
    ----------
    preload : sequence of str
        Names of modules to import in that process, so that workers start faster. Modules that are
        not installed are ignored.

    Examples
    --------
    >>> import multiprocessing
    >>> chainermn.iterators.start_forkserver()
    >>> multiprocessing.get_start_method()
    'forkserver'
    """
    multiprocessing.set_start_method("forkserver", force=True)
    multiprocessing.set_forkserver_preload([without_working_folder.__module__, *preload])
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_RANKS)  # workers inherit it
    try:
        with without_working_folder():
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class MultiprocessIterator(chainer.iterators.MultiprocessIterator):
    """Reads examples in worker processes, several batches ahead.

    It works like ``chainer.iterators.MultiprocessIterator``, with two differences. First, workers
    start the next batches while the last examples of one are still being read, so they do not wait
    for each other; this takes shared memory for three batches. Second, workers end with their
    rank, even if it is killed.

    Call `start_forkserver` at the start of your script, before `create_communicator`.

    Parameters
    ----------
    dataset : dataset
        Data set to read. Workers receive a pickled copy, unless they are forked.
    batch_size : int
        Number of examples in a batch.
    repeat : bool
        Whether to continue after the first epoch.
    shuffle : bool, optional
        Whether to shuffle before each epoch; true by default.
    n_processes : int, optional
        Number of workers. Give this rank's share of the cores of its host; the default is all
        cores.
    n_prefetch : int
        Number of batches to read ahead.
    shared_mem : int, optional
        Size of the largest example in bytes; by default, the largest of the first batch.
    order_sampler : callable, optional
        Order of the examples, such as `create_distributed_sampler` returns.
    dataset_timeout : float, optional
        Number of seconds after which reading an example causes a ``TimeoutWarning``.
    maxtasksperchild : int, optional
        Number of examples after which a worker is replaced by a new one.

    Examples
    --------
    >>> chainermn.iterators.start_forkserver()
    >>> numbers = chainermn.scatter_dataset(np.arange(100), comm)
    >>> iterator = chainermn.iterators.MultiprocessIterator(numbers, 4, n_processes=2)
    >>> len(next(iterator))
    4
    >>> iterator.finalize()
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
    """A data set that sets up the workers that receive it."""

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
    """Thread that lets workers read several batches; each has a slot in shared memory."""

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
                # Workers must have stopped writing before another batch uses the slot.
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
        self.prefetch_state, indices = multiprocess_iterator._statemachine.iterator_statemachine(
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
