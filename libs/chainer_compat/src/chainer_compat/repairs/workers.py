"""Raise failures in the processes of ``MultiprocessIterator``."""

import functools
import signal
import threading
from multiprocessing import pool as pools
from types import ModuleType
from typing import Any

from chainer_compat import surgery


def raise_failures(module: ModuleType) -> None:
    """Let ``next`` raise the data set's exception, and RuntimeError if a worker is killed.

    Without this, an exception ends the thread that would deliver the batch. If a worker is killed,
    the pool starts another one, but the work of the first is never done. Workers that have done
    their share (``maxtasksperchild``) are replaced without a failure.
    """

    class Thread(threading.Thread):
        """A thread, such as that of the first batch, whose exception ``join`` raises."""

        _failure: BaseException | None = None

        def run(self) -> None:
            try:
                super().run()
            except BaseException as error:
                self._failure = error

        def join(self, timeout: float | None = None) -> None:
            super().join(timeout)
            if self._failure is not None:
                raise self._failure

    class Communicator(module._Communicator):  # type: ignore[name-defined]
        failure: BaseException | None = None
        _pool: Any = None

        def watch(self, pool: Any) -> None:
            self._pool, self._workers = pool, set(pool._pool)

        def check(self) -> Any:
            # The thread calls this before each batch.
            self._check_workers()
            return super().check()

        @property
        def is_terminated(self) -> bool:
            # The thread asks this repeatedly while it waits for workers.
            self._check_workers()
            return bool(super().is_terminated)

        def get(self) -> Any:
            found = super().get() if self.failure is None else None
            if self.failure is not None:
                raise self.failure
            return found

        def fail(self, failure: BaseException) -> None:
            with self._lock:
                self.failure = failure
                self._batch_queue.append((None, None))
                self._not_empty_cond.notify()

        def _check_workers(self) -> None:
            if self._pool is None:
                return
            # The pool removes ended workers; one that has done its share ends with 0.
            workers = set(self._pool._pool)
            for worker in self._workers - workers:
                if worker.exitcode != 0:
                    raise RuntimeError(
                        f"a worker process of MultiprocessIterator (process {worker.pid}) "
                        f"{ending(worker.exitcode)}"
                    )
            self._workers = workers

    def run(self: Any) -> None:
        pool = self._pool
        self._comm.watch(pool)
        # The pool itself would divide by its number of workers each time, which is briefly 0 while
        # all of them are being replaced.
        chunksize = -(-self.batch_size // (4 * len(pool._pool)))
        pool.map_async = functools.partial(pool.map_async, chunksize=chunksize)
        try:
            while not self._terminating and self._task():
                pass
        except BaseException as error:
            self._pool = None
            _abandon(pool)
            self._comm.fail(error)
        else:
            pool.close()
            pool.join()

    module.threading = surgery.view(threading, Thread=Thread)  # type: ignore[attr-defined]
    module._Communicator = Communicator  # type: ignore[attr-defined]
    module._PrefetchLoop._run = run


def ending(code: int) -> str:
    """Describe how a process with this exit code ended."""
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was killed by {signal.Signals(-code).name}"


def _abandon(pool: Any) -> None:
    """End a pool's workers without taking a lock that a killed worker may have held."""
    pool._terminate.cancel()
    pool.close()
    pool._worker_handler._state = pools.TERMINATE  # keeps it from replacing killed workers
    pool._change_notifier.put(None)
    pool._worker_handler.join()
    for worker in pool._pool:
        worker.kill()
