"""Write snapshots beside training: the state of their iteration, and no failure in silence."""

import copy
import multiprocessing
import threading
from multiprocessing import util
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

from chainer_compat import surgery
from chainer_compat.repairs.workers import ending


def write_copies(module: ModuleType) -> None:
    """Let writers with a thread or process write copies, raise failures, and end.

    Without this, they write arrays that training changes in the meantime, failures stay in the
    thread or process, and ``n_retains`` either does nothing or cannot be sent to the process. A
    queue's thread or process starts even on ranks that never write, and keeps them from ending.

    A failure is raised at the next snapshot, or in ``finalize``. If a queue fails, it is dropped.
    """
    standard, queue_writer = module.StandardWriter, module.QueueWriter

    @surgery.replaces(standard, "__call__")
    def write(self: Any, filename: str, outdir: str, target: Any) -> None:
        standard.finalize(self)
        copied = copy.deepcopy(target)
        self._worker = self.create_worker(filename, outdir, copied, **self._kwds)
        self._worker.start()

    @surgery.replaces(standard, "finalize")
    def wait(self: Any) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            _join(worker, self)

    @surgery.replaces(module.ThreadWriter, "create_worker")
    def create_thread(self: Any, filename: str, outdir: str, target: Any, **kwds: Any) -> Any:
        return _Thread(
            target=self.save, args=(filename, outdir, target, self._savefun), kwargs=kwds
        )

    @surgery.replaces(module.ProcessWriter, "create_worker")
    def create_process(self: Any, filename: str, outdir: str, target: Any, **kwds: Any) -> Any:
        writer = module.SimpleWriter(self._savefun, **kwds)
        return multiprocessing.Process(target=writer, args=(filename, outdir, target))

    @surgery.replaces(queue_writer, "__init__")
    def __init__(self: Any, savefun: Any = module.npz.save_npz, task: Any = None) -> None:
        module.Writer.__init__(self)
        self._task = self.create_task(savefun) if task is None else task

    @surgery.replaces(queue_writer, "__call__")
    def put(self: Any, filename: str, outdir: str, target: Any) -> None:
        if self._consumer is not None and not self._consumer.is_alive():
            queue_writer.finalize(self)
        if self._consumer is None:
            self._queue = self.create_queue()
            self._consumer = self.create_consumer(self._queue)
            # For scripts that end without finalize; before the queue's own ends with 10.
            self._end = util.Finalize(None, queue_writer.finalize, (self,), exitpriority=20)
            self._consumer.start()
        elif isinstance(self._consumer, BaseProcess):
            self._post_save()
        self._queue.put([self._task, filename, outdir, copy.deepcopy(target)])

    @surgery.replaces(queue_writer, "consume")
    def consume(self: Any, queue: Any) -> None:
        _write_all(queue, self._post_save)

    @surgery.replaces(queue_writer, "finalize")
    def end(self: Any) -> None:
        consumer, self._consumer = self._consumer, None
        queue, self._queue = self._queue, None
        if consumer is not None:
            self._end.cancel()
            queue.put(None)
            _join(consumer, self)

    @surgery.replaces(module.ProcessQueueWriter, "create_queue")
    def create_queue(self: Any) -> Any:
        queue: Any = multiprocessing.JoinableQueue()
        queue.cancel_join_thread()  # if the process fails, nobody reads the rest
        return queue

    @surgery.replaces(module.ThreadQueueWriter, "create_consumer")
    def create_consuming_thread(self: Any, queue: Any) -> Any:
        # Python waits for other threads before it runs what ends this one.
        return _Thread(target=self.consume, args=(queue,), daemon=True)

    @surgery.replaces(module.ProcessQueueWriter, "create_consumer")
    def create_consuming_process(self: Any, queue: Any) -> Any:
        return multiprocessing.Process(target=_write_all, args=(queue,))


class _Thread(threading.Thread):
    """A thread that keeps the exception that ended it."""

    failure: BaseException | None = None

    def run(self) -> None:
        try:
            super().run()
        except BaseException as failure:
            self.failure = failure


def _join(worker: Any, writer: Any) -> None:
    """Wait for a thread or process, and raise its failure."""
    worker.join()
    if isinstance(worker, _Thread) and worker.failure is not None:
        raise worker.failure
    if isinstance(worker, BaseProcess):
        if worker.exitcode:
            raise RuntimeError(
                f"the process that writes snapshots for {type(writer).__name__} "
                f"{ending(worker.exitcode)}"
            )
        writer._post_save()  # here, as functions that remove old files cannot always be sent


def _write_all(queue: Any, post_save: Any = lambda: None) -> None:
    while (task := queue.get()) is not None:
        write, *arguments = task
        write(*arguments)
        queue.task_done()
        post_save()
    queue.task_done()
