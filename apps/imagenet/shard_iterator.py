"""The images of a rank, from shards that it reads sequentially."""

import functools
import io
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import chainer
import numpy as np

from chainermn.global_except_hook import exit_job
from shards import Shards

# An image is used up to this many places earlier or later than it is read. A shard that pack.py
# wrote has images of all classes.
WINDOW = 1000
BATCHES_AHEAD = 4
SECONDS_TO_WAIT = 300


class ShardOrder:
    """The images of a rank: the order in which it reads them, and the order in which it uses them.

    Shards are shuffled, and their images are divided among the ranks. Each rank reads its part of
    the sequence from beginning to end, and uses each image less than `WINDOW` places earlier or
    later. Together, the ranks use each image once per epoch. Ranks with one image fewer than
    others get a blank at the end, so that all ranks end the epoch together.

    Parameters
    ----------
    counts : sequence of int
        Number of images in each shard.
    rank, size : int
    seed : int, optional
        By default nothing is shuffled, and there are no blanks.
    """

    BLANK = -1
    order: Callable[[int], np.ndarray]

    def __init__(
        self, counts: Sequence[int], rank: int, size: int, seed: int | None = None
    ) -> None:
        self.counts = np.asarray(counts, np.int64)
        self.rank, self.size, self.seed = rank, size, seed
        self.n = int(self.counts.sum())
        self.begin, self.end = self.n * rank // size, self.n * (rank + 1) // size
        self.n_blanks = 0 if seed is None else -(-self.n // size) - (self.end - self.begin)
        # An iterator is saved for each batch that is read ahead.
        self.order = functools.lru_cache(1)(self._order)

    def __len__(self) -> int:
        return self.end - self.begin + self.n_blanks

    def plan(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of images as they are read, and the order of using these places.

        They depend only on seed, epoch, rank and number of ranks.
        """
        starts = np.cumsum(self.counts) - self.counts
        shards = np.arange(len(self.counts))
        if self.seed is not None:
            shards = np.random.default_rng([self.seed, epoch]).permutation(shards)
        sequence = [np.arange(starts[i], starts[i] + self.counts[i]) for i in shards]
        read = np.concatenate(sequence)[self.begin : self.end]
        places = np.arange(len(read), dtype=np.float64)
        if self.seed is not None:
            random = np.random.default_rng([self.seed, epoch, self.rank, self.size])
            places += random.uniform(0, WINDOW, len(read))
        return read, np.argsort(places, kind="stable")

    def _order(self, epoch: int) -> np.ndarray:
        """Return the order of an epoch, counted from 0, with `BLANK` for blanks."""
        read, places = self.plan(epoch)
        return np.concatenate([read[places], np.full(self.n_blanks, self.BLANK)])


class ShardIterator(chainer.dataset.Iterator):
    """Iterator over the images of a rank. A thread reads shards, others make examples of images.

    A shard that cannot be read ends the job.

    A snapshot of it holds the place in the epoch. A resumed run reads the shard again from the
    first image that is still to come.

    Parameters
    ----------
    shards : Shards
    order_sampler : ShardOrder
    batch_size : int
        Batch size: at least 2 if the order has blanks, which are left out of their batch.
    make : callable
        ``make(file, name, label, number)`` returns an example, from a binary file and a number
        that also tells the epoch, as in `data.Images`.
    n_threads : int
    repeat : bool
        Whether to continue with the next epoch.
    """

    def __init__(
        self,
        shards: Shards,
        order_sampler: ShardOrder,
        batch_size: int,
        make: Callable[[io.BytesIO, str, int, int], Any],
        n_threads: int,
        repeat: bool = True,
    ) -> None:
        self._reader = ThreadPoolExecutor(1)  # one thread reads in sequence
        self._makers = ThreadPoolExecutor(max(n_threads, 1))
        if order_sampler.n % order_sampler.size and batch_size < 2 and repeat:
            raise ValueError(
                f"{order_sampler.n} images in shards for {order_sampler.size} ranks: batches "
                "must have at least 2 images, as those of one rank end with one less"
            )
        self.shards, self.order_sampler, self.batch_size = shards, order_sampler, batch_size
        self.make, self.repeat = make, repeat
        self.reset()

    def reset(self) -> None:
        """Start from the beginning."""
        self._previous_epoch_detail = -1.0
        self.is_new_epoch = False
        self._start(0, 0)

    def __next__(self) -> list[Any]:
        left = len(self.order_sampler) * (1 - self.epoch) - self.current_position
        n = self.batch_size if self.repeat else min(self.batch_size, left)
        if n <= 0:
            raise StopIteration
        while len(self._ahead) < n + BATCHES_AHEAD * self.batch_size:
            self._ahead.append(self._request())
        try:
            batch = [self._ahead.popleft().result(SECONDS_TO_WAIT) for _ in range(n)]
        except TimeoutError:
            exit_job(f"no image has come from {self.shards.folder} for {SECONDS_TO_WAIT} seconds")
        except OSError as error:
            exit_job(str(error))
        self._previous_epoch_detail = self.epoch_detail
        n_epochs, self.current_position = divmod(
            self.current_position + n, len(self.order_sampler)
        )
        self.epoch += n_epochs
        self.is_new_epoch = n_epochs > 0
        return [example for example in batch if example is not None]

    next = __next__

    @property
    def epoch_detail(self) -> float:
        """Number of completed epochs, plus the completed share of the current one."""
        return self.epoch + self.current_position / max(len(self.order_sampler), 1)

    @property
    def previous_epoch_detail(self) -> float | None:
        """What ``epoch_detail`` was before the latest batch; None before the first."""
        return None if self._previous_epoch_detail < 0 else self._previous_epoch_detail

    def finalize(self) -> None:
        """End the threads."""
        for pool in (self._reader, self._makers):
            pool.shutdown(wait=False, cancel_futures=True)

    def serialize(self, serializer: chainer.AbstractSerializer) -> None:
        """Save or load the place in the epoch."""
        position = serializer("current_position", self.current_position)
        epoch = serializer("epoch", self.epoch)
        self.is_new_epoch = bool(serializer("is_new_epoch", self.is_new_epoch))
        self._previous_epoch_detail = float(
            serializer("previous_epoch_detail", self._previous_epoch_detail)
        )
        # A snapshot of a different number of ranks compares its length.
        serializer("order", self.order_sampler.order(int(epoch)))
        if isinstance(serializer, chainer.Deserializer):
            self._start(int(epoch), int(position))

    def _start(self, epoch: int, position: int) -> None:
        self.epoch, self.current_position = epoch, position
        self._ahead: deque[Future[Any]] = deque()
        self._images = self._read(epoch, position)

    def _request(self) -> Future[Any]:
        image = self._reader.submit(next, self._images, None)
        return self._makers.submit(self._example, image)

    def _example(self, image: Future[Any]) -> Any:
        found = image.result()
        if found is None:
            return None
        number, content, name, label = found
        return self.make(io.BytesIO(content), name, label, number)

    def _read(self, epoch: int, position: int) -> Iterator[tuple[int, bytes, str, int] | None]:
        """Yield images, and None for a blank, from a place in an epoch on."""
        while True:
            numbers, places = self.order_sampler.plan(epoch)
            places = places[position:]
            images = self.shards.read_images(numbers[np.sort(places)])
            waiting: dict[int, Any] = {}
            for number in numbers[places].tolist():
                while number not in waiting:
                    read, *waiting[read] = next(images)
                content, name, label = waiting.pop(number)
                yield number + self.order_sampler.n * epoch, content, name, label
            n_blanks = min(len(self.order_sampler) - position, self.order_sampler.n_blanks)
            yield from itertools.repeat(None, n_blanks)
            if not self.repeat:
                return
            epoch, position = epoch + 1, 0
