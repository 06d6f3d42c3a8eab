"""Batches of sentences of similar length."""

from collections.abc import Iterator, Sequence

import chainer
import numpy as np

from corpus import ParallelText, ending_job
from index import SOURCE_LENGTH, TARGET_LENGTH
from vocabulary import PADDING


def hold_out(index: np.ndarray, n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Divide an index at random into training rows and ``n`` validation rows, at most half."""
    order = np.random.RandomState(seed).permutation(len(index))
    n = min(n, len(index) // 2)
    return index[order[n:]], index[order[:n]]


def cut_batches(index: np.ndarray, batchsize: int) -> list[np.ndarray]:
    """Cut rows into batches of similar length.

    Validation data are scattered in whole batches, because the last bit of a result depends on the
    rest of its batch. So translations are the same on any number of ranks.
    """
    order = np.lexsort((index[:, TARGET_LENGTH], index[:, SOURCE_LENGTH]))
    return [index[order[i : i + batchsize]] for i in range(0, len(order), batchsize)]


def pad(sentences: Sequence[np.ndarray]) -> np.ndarray:
    """Put sentences into one array of shape (sentences, length of the longest)."""
    padded = np.full((len(sentences), max(map(len, sentences))), PADDING, np.int32)
    for row, sentence in zip(padded, sentences, strict=True):
        row[: len(sentence)] = sentence
    return padded


@chainer.dataset.converter()
def to_batch(
    examples: list[tuple[np.ndarray, np.ndarray]], device: chainer.backend.Device
) -> tuple[np.ndarray, np.ndarray]:
    """Make two padded arrays of examples, in host memory whatever the device.

    A network sends the arrays it needs to its device. So the lengths of sentences are known to
    the host without waiting for a GPU.
    """
    xs, ys = zip(*examples, strict=True)
    return pad(xs), pad(ys)


class BucketIterator(chainer.dataset.Iterator):
    """Batches of sentences of similar length, reshuffled for each epoch.

    The batches depend only on the seed and the epoch, and their number only on the number of
    examples. So ranks with equally many examples end their epochs together, and reach their
    batches of long sentences at about the same time.

    Parameters
    ----------
    dataset : ParallelText
    batchsize : int
    seed : int
        Seed, the same on all ranks.
    pool : int
        Number of batches whose examples are sorted together. More batches mean less padding, and
        less randomness.
    """

    def __init__(self, dataset: ParallelText, batchsize: int, seed: int, pool: int = 50) -> None:
        self.dataset, self.batchsize, self.seed, self.pool = dataset, batchsize, seed, pool
        self.epoch = self.position = 0  # position: batches of this epoch so far
        self.is_new_epoch = False
        self._batches = self._shuffle()

    def __next__(self) -> list[tuple[np.ndarray, np.ndarray]]:
        with ending_job():
            batch = [self.dataset[i] for i in self._batches[self.position]]
        self.position += 1
        self.is_new_epoch = self.position == len(self._batches)
        if self.is_new_epoch:
            self.epoch, self.position = self.epoch + 1, 0
            self._batches = self._shuffle()
        return batch

    @property
    def epoch_detail(self) -> float:
        """Epochs so far."""
        return self.epoch + self.position / len(self._batches)

    def serialize(self, serializer: chainer.AbstractSerializer) -> None:
        """Read or write the position. Rank 0's state works for any number of ranks."""
        n_batches = int(serializer("n_batches", len(self._batches)))
        position = int(serializer("position", self.position))
        self.epoch = int(serializer("epoch", self.epoch))
        self.is_new_epoch = bool(serializer("is_new_epoch", self.is_new_epoch))
        self._batches = self._shuffle()
        self.position = position * len(self._batches) // n_batches

    def finalize(self) -> None:
        """Close the files."""
        self.dataset.close()

    def _shuffle(self) -> list[list[int]]:
        random = np.random.RandomState([self.seed, self.epoch])
        order = random.permutation(len(self.dataset))
        size = self.batchsize * self.pool
        batches = [batch for pool in _cut(order, size) for batch in self._cut_sorted(pool)]
        return [batches[i].tolist() for i in random.permutation(len(batches))]

    def _cut_sorted(self, pool: np.ndarray) -> Iterator[np.ndarray]:
        lengths = self.dataset.index[pool]
        by_length = np.lexsort((lengths[:, TARGET_LENGTH], lengths[:, SOURCE_LENGTH]))
        return _cut(pool[by_length], self.batchsize)


def _cut(order: np.ndarray, size: int) -> Iterator[np.ndarray]:
    return (order[i : i + size] for i in range(0, len(order), size))
