"""Chainer's MultiprocessIterator, with workers that need not wait for the end of a batch."""

from collections import deque
from multiprocessing import TimeoutError
from multiprocessing.sharedctypes import RawArray

import chainer
from chainer.iterators import _statemachine, multiprocess_iterator

# Batches that workers read at a time. Chainer lets them begin the next one only when all of one
# has been read and copied, and meanwhile some of them wait.
IN_FLIGHT = 3


class _Loop(multiprocess_iterator._PrefetchLoop):
    """Thread that hands out the reading of several batches; each has a slot of shared memory."""

    def _allocate_shared_memory(self) -> None:
        self._pending = deque()
        self._free = deque(range(IN_FLIGHT))
        self.mem_bulk = RawArray("b", IN_FLIGHT * self.batch_size * self.mem_size)

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

    def _next(self) -> tuple | None:
        """Wait for the oldest batch; None if the iterator has been finalized."""
        slot, future, state = self._pending.popleft()
        batch = None
        while future is not None:
            try:
                packed = future.get(multiprocess_iterator._response_time)
            except TimeoutError:
                if self._comm.is_terminated:
                    return None
            else:
                batch = [multiprocess_iterator._unpack(data, self.mem_bulk) for data in packed]
                break
        self._free.append(slot)
        return batch, state


class MultiprocessIterator(chainer.iterators.MultiprocessIterator):
    """As Chainer's, for which ``shared_mem`` has to be given."""

    def _initialize_loop(self) -> None:
        self._comm = multiprocess_iterator._Communicator(self.n_prefetch, self.dataset_timeout)
        self.reset()
        self._prefetch_loop = _Loop(
            self.dataset,
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
