"""Record what is enqueued on a GPU, and launch it as a whole."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any


class Recorder:
    """Records on a stream of its own, with memory from a pool of its own.

    A graph keeps the addresses of its arrays. Only graphs take memory from the pool, so between
    launches its arrays are never overwritten.

    Parameters
    ----------
    cupy
        The module CuPy. The current device must be the one of the model.
    """

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._pool = cupy.cuda.MemoryPool()
        self._stream = cupy.cuda.Stream(non_blocking=True)

    @property
    def n_bytes(self) -> int:
        """Size of the pool."""
        return int(self._pool.total_bytes())

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Enqueue on the stream, with memory of the pool, in the ``with`` block.

        Other streams do not wait for it: call `wait` afterwards.
        """
        # This stream does not wait for the default one by itself.
        self._cupy.cuda.get_current_stream().synchronize()
        with self._stream, self._cupy.cuda.using_allocator(self._pool.malloc):
            yield

    def wait(self) -> None:
        """Wait until the stream has done its work."""
        self._stream.synchronize()

    def record(self, enqueue: Callable[[], None]) -> Any:
        """Return a graph of what a function enqueues. Nothing is done yet.

        Raises
        ------
        Exception
            Whatever the function raises; CuPy's errors if it waits for the GPU or calls a library
            that cannot be recorded; RuntimeError if CUDA refuses the graph.
        """
        gc.collect()
        was_on = gc.isenabled()
        gc.disable()  # freeing an array or event of somebody else could call CUDA in between
        try:
            with self._stream, self._cupy.cuda.using_allocator(self._pool.malloc):
                self._stream.begin_capture()
                try:
                    enqueue()
                except BaseException:
                    with contextlib.suppress(Exception):  # the capture has failed, too
                        self._stream.end_capture()
                    raise
                return self._stream.end_capture()
        finally:
            if was_on:
                gc.enable()

    def launch(self, graph: Any) -> None:
        """Launch a graph on the current stream."""
        graph.launch(self._cupy.cuda.get_current_stream())
