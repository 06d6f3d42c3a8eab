"""Convert batches and copy them to the GPU while it computes."""

from __future__ import annotations

import concurrent.futures
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

import chainer
from chainer.backends.cuda import GpuDevice
from chainer.dataset import Converter, Iterator, concat_examples
from chainer.dataset.convert import _call_converter
from chainer.iterators import ShuffleOrderSampler
from chainer.serializers import DictionarySerializer

from chainermn.iterators.multi_node_iterator import MultiNodeIterator
from chainermn.transport.gpu.device import on_gpu, the_gpu

AnyConverter: TypeAlias = Any  # an old function of Chainer's is none of its converters

# Batches that are made while the GPU computes. The second makes up for one that takes longer.
_AHEAD = 2
_POSITION = (
    "epoch",
    "is_new_epoch",
    "current_position",
    "epoch_detail",
    "previous_epoch_detail",
)
_AS_THEY_ARE = (*chainer.get_array_types(), bool, complex, float, int, str, bytes, type(None))


def prefetch_to_device(
    iterator: Iterator,
    converter: AnyConverter = concat_examples,
    device: chainer.backend.Device | None = None,
) -> tuple[Iterator, AnyConverter]:
    """Let a thread read, convert and copy batches to the GPU while it computes.

    Give the updater what this returns. Unless ``device`` is a GPU, that is the iterator and the
    converter, unchanged.

    The batches and their order stay the same, and a snapshot continues after the batch that was
    used last. Batches lie in pinned memory until a separate stream has copied them. The arrays of
    a batch are yours: they stay as they are for as long as you keep them.

    Parameters
    ----------
    iterator : chainer.dataset.Iterator
        Iterator to read from. The thread calls it, so neither its data set nor its order may draw
        numbers from NumPy's global generator. Its ``serialize`` is called for every batch.
    converter : callable
        Converter that an updater would get. It may compute on the GPU. The thread calls it, where
        ``chainer.global_config`` applies, but not what ``chainer.using_config`` changes.
    device : chainer.backend.Device, optional
        Device to which an updater would send batches.

    Returns
    -------
    iterator : chainer.dataset.Iterator
        Iterator over converted batches.
    converter : callable
        Converter that returns these as they are.

    Raises
    ------
    TypeError
        If the batches come from another rank, by `create_multi_node_iterator`.
    ValueError
        If the iterator draws its order from NumPy's global generator.

    Examples
    --------
    >>> device = chainermn.choose_device(comm, gpu=False)
    >>> iterator = chainer.iterators.SerialIterator(data, 10)
    >>> iterator, converter = chainermn.iterators.prefetch_to_device(
    ...     iterator, chainer.dataset.concat_examples, device
    ... )
    >>> updater = chainer.training.StandardUpdater(iterator, optimizer, converter, device)
    """
    if not isinstance(device, GpuDevice):
        return iterator, converter
    if isinstance(iterator, MultiNodeIterator):
        raise TypeError(
            "prefetch_to_device(iterator): expected an iterator that reads on this rank, got a "
            "MultiNodeIterator: its ranks must take their batches together; use it as it is"
        )
    sampler = getattr(iterator, "order_sampler", None)
    # A MultiprocessIterator has a generator of its own.
    if isinstance(sampler, ShuffleOrderSampler) and not isinstance(
        iterator, chainer.iterators.MultiprocessIterator
    ):
        raise ValueError(
            f"prefetch_to_device(iterator): expected an order that does not depend on NumPy's "
            f"global generator, got a {type(iterator).__name__} with a ShuffleOrderSampler: pass "
            "it order_sampler=chainermn.datasets.create_distributed_sampler(dataset, comm), or "
            "use chainermn.iterators.MultiprocessIterator"
        )
    return PrefetchIterator(iterator, converter, device), _as_it_is


class PrefetchIterator(Iterator):
    """The iterator that `prefetch_to_device` returns if the device is a GPU.

    All other attributes are those of the iterator that it reads from, at the batch that ``next``
    returned last.

    Examples
    --------
    >>> device = chainermn.choose_device(comm, gpu=False)
    >>> iterator = chainer.iterators.SerialIterator(data, batch_size=2, shuffle=False)
    >>> iterator, _ = chainermn.iterators.prefetch_to_device(iterator, device=device)
    >>> iterator.batch_size, iterator.epoch
    (2, 0)
    """

    def __init__(self, iterator: Iterator, converter: AnyConverter, device: GpuDevice) -> None:
        self._actual, self._converter, self._device = iterator, converter, device
        with chainer.using_device(device):
            self._stream = the_gpu().new_stream()
        self._thread: ThreadPoolExecutor | None = None
        self._ahead: deque[Future[_Prepared]] = deque()
        self._position: dict[str, Any] = {}
        self._saved: dict[str, Any] | None = None

    def __next__(self) -> Any:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "chainermn prefetch")
        while len(self._ahead) <= _AHEAD:
            self._ahead.append(self._thread.submit(self._prepare))
        prepared = self._ahead.popleft().result()
        self._position, self._saved = prepared.position, prepared.saved
        if prepared.error is not None:
            raise prepared.error
        gpu = the_gpu()
        gpu.wait_for(prepared.copied)
        # Copies in memory of the script's stream can be kept and freed as any other arrays. That
        # of the other stream is given back to it, once it waits for these copies.
        batch = _copy(prepared.batch)
        taken = gpu.record()
        with gpu.on(self._stream):
            gpu.wait_for(taken)
        return batch

    next = __next__

    def reset(self) -> None:
        """Start from the beginning."""
        self._discard()
        self._actual.reset()

    def finalize(self) -> None:
        """Stop the thread, and what the iterator has started."""
        if "_saved" in self.__dict__:
            self._settle()
            self._actual.finalize()
            if self._thread is not None:
                # Not waited for, as it may itself have dropped the last reference to this.
                self._thread.shutdown(wait=False)
                self._thread = None

    def serialize(self, serializer: Any) -> None:
        """Save the state after the batch that was taken last; or load one, and continue there."""
        if self._saved is not None and isinstance(serializer, chainer.Serializer):
            for key, value in self._saved.items():
                serializer(key, value)
        else:
            self._discard()
            self._actual.serialize(serializer)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._position[name] if name in self._position else getattr(self._actual, name)

    def _prepare(self) -> _Prepared:
        """Make the next batch, in the thread."""
        batch = copied = error = None
        try:
            examples = next(self._actual)
            gpu = the_gpu()
            with gpu.on(self._stream):
                batch = _call_converter(self._converter, examples, self._device)
                copied = gpu.record()
        except BaseException as raised:
            error = raised
        actual, saved = self._actual, DictionarySerializer()
        position = {name: getattr(actual, name) for name in _POSITION if hasattr(actual, name)}
        actual.serialize(saved)
        return _Prepared(batch, copied, error, position, saved.target)

    def _settle(self) -> None:
        """Wait until the thread has nothing to do; start no batch."""
        self._ahead = deque(future for future in self._ahead if not future.cancel())
        concurrent.futures.wait(self._ahead)

    def _discard(self) -> None:
        """Forget what has been read ahead."""
        self._settle()
        self._ahead.clear()
        self._position, self._saved = {}, None


@dataclass
class _Prepared:
    batch: Any
    copied: Any  # event
    error: BaseException | None
    position: dict[str, Any]
    saved: dict[str, Any]


class _AsItIs(Converter):
    def __call__(self, batch: Any, device: Any = None) -> Any:
        return batch


_as_it_is = _AsItIs()


def _copy(value: Any) -> Any:
    """Copy arrays in GPU memory, in any tuples, lists and dictionaries."""
    if on_gpu(value):
        return value.copy()
    if isinstance(value, tuple):
        return getattr(value, "_make", tuple)(map(_copy, value))
    if isinstance(value, list):
        return [*map(_copy, value)]
    if isinstance(value, dict):
        return {key: _copy(one) for key, one in value.items()}
    if not isinstance(value, _AS_THEY_ARE):
        raise TypeError(
            "prefetch_to_device(iterator, converter): expected a converter that returns arrays, "
            f"numbers and strings, in tuples, lists and dictionaries, got {type(value)} in them"
        )
    return value
