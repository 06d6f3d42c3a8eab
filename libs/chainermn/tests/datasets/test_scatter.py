"""One rank's data set divided among all ranks, against the same division in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import chainer
import numpy as np
import pytest
from chainer.datasets import DictDataset, SubDataset, TransformDataset, TupleDataset
from chainer.iterators import MultiprocessIterator, MultithreadIterator, SerialIterator
from hypothesis import given, settings
from hypothesis import strategies as st

import chainermn
from chainermn.testing.mpiexec import run_job

HERE = Path(__file__).parent
PROPERTY = settings(max_examples=25)


def expected_examples(
    n: int, rank: int, size: int, shuffle: bool, seed: int | None, equal: bool
) -> list[int]:
    order = np.random.RandomState(seed).permutation(n) if shuffle else np.arange(n)
    if equal:
        begin = n * rank // size
        return [int(i) for i in order[begin : begin + -(-n // size)]]
    return [int(i) for i in np.array_split(order, size)[rank]]


def images(n: int) -> np.ndarray:
    return np.arange(n * 6, dtype="f4").reshape(n, 2, 3)


def labels(n: int) -> np.ndarray:
    return np.arange(n, dtype="i4")


def double(example: Any) -> Any:
    return (example[0] * 2, example[1])


def types_of(example: Any) -> list[Any]:
    parts = example if isinstance(example, tuple) else [example]
    return [getattr(part, "dtype", type(part)) for part in parts]


class OddTuples(TupleDataset):
    """Tuples that differ from what the columns say."""

    def __getitem__(self, index: Any) -> Any:
        return ("odd", super().__getitem__(index))


KINDS = {
    "array": images,
    "array of strings": lambda n: np.array([f"path {i}" for i in range(n)], "U10"),
    "array of objects": lambda n: np.array([{"i": i} for i in range(n)], object),
    "list": lambda n: [(f"path {i}", i) for i in range(n)],
    "tuples": lambda n: TupleDataset(images(n), labels(n)),
    "tuples of array and list": lambda n: TupleDataset(images(n), [str(i) for i in range(n)]),
    "dict": lambda n: DictDataset(x=images(n), t=labels(n)),
    "subset": lambda n: SubDataset(TupleDataset(images(n + 3), labels(n + 3)), 2, n + 2),
    "shuffled subset": lambda n: SubDataset(images(n + 1), 1, n + 1, list(range(n, -1, -1))),
    "nested subset": lambda n: SubDataset(
        SubDataset(images(n + 4), 1, n + 4, np.random.RandomState(0).permutation(n + 4)), 1, n + 1
    ),
    "transformed": lambda n: TransformDataset(TupleDataset(images(n), labels(n)), double),
    "subclass": lambda n: OddTuples(images(n), labels(n)),
    "tuple": lambda n: tuple(range(n)),
}


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_kind_of_data_set(comm: Any, kind: str, shuffle: bool) -> None:
    whole = KINDS[kind](11)
    part = chainermn.scatter_dataset(
        whole if comm.rank == 0 else None, comm, shuffle=shuffle, seed=5, max_buf_len=50
    )
    indices = expected_examples(11, comm.rank, comm.size, shuffle, 5, True)
    assert type(part) is SubDataset
    assert len(part) == len(indices)
    for got, index in zip(part, indices, strict=True):
        expected = whole[index]
        assert type(got) is type(expected)
        np.testing.assert_equal(got, expected)
        assert types_of(got) == types_of(expected)


@pytest.mark.mpi(1, 3)
@PROPERTY
@given(
    n=st.integers(0, 13),
    root=st.integers(0, 3),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
    equal=st.booleans(),
    buffer=st.sampled_from([1, 7, 64, 10**9]),
)
def test_division(n: int, root: int, shuffle: bool, seed: int, equal: bool, buffer: int) -> None:
    comm = chainermn.create_communicator("naive")
    root %= comm.size
    part = chainermn.scatter_dataset(
        TupleDataset(images(n), labels(n)) if comm.rank == root else None,
        comm,
        root,
        shuffle,
        seed,
        buffer,
        force_equal_length=equal,
    )
    indices = expected_examples(n, comm.rank, comm.size, shuffle, seed, equal)
    assert [int(label) for _, label in part] == indices
    assert all((image == images(n)[label]).all() for image, label in part)


@pytest.mark.mpi(1, 3)
def test_bare_communicator_of_mpi(comm: Any) -> None:
    numbers = np.arange(7) if comm.rank == 0 else None
    part = chainermn.scatter_dataset(numbers, comm.mpi_comm, shuffle=True, seed=1)
    expected = chainermn.scatter_dataset(numbers, comm, shuffle=True, seed=1)
    assert list(part) == list(expected)
    with pytest.raises(TypeError, match="rank 0 must pass a data set with a length"):
        chainermn.scatter_dataset(None, comm.mpi_comm)


@pytest.mark.mpi(3)
def test_a_rank_holds_its_own_examples_only(comm: Any) -> None:
    whole = TupleDataset(images(12), images(12))
    part = chainermn.scatter_dataset(whole if comm.rank == 0 else None, comm)
    columns = [image.base for image in part[0]]
    assert [len(column) for column in columns] == [12 // comm.size] * 2
    assert all(column.base is None and column.flags.writeable for column in columns)


@pytest.mark.mpi(1, 3)
def test_part_feeds_an_iterator(comm: Any) -> None:
    part = chainermn.scatter_dataset(TupleDataset(images(6), labels(6)), comm)
    iterator = chainer.iterators.SerialIterator(part, 2, shuffle=False)
    x, t = chainer.dataset.concat_examples(next(iterator))
    assert x.shape == (2, 2, 3)
    assert list(t) == [6 * comm.rank // comm.size, 6 * comm.rank // comm.size + 1]


@pytest.mark.mpi(3)
@pytest.mark.parametrize("kind", ["list", "subclass"])  # sent by columns, and as a whole
@pytest.mark.parametrize(
    ("n", "message"),
    [
        (0, "ranks 0 to 2 have no example: 0 examples, 3 ranks; the data set is empty"),
        (1, "ranks 1 to 2 have no example: 1 example, 3 ranks; pass force_equal_length=True"),
        (2, "rank 2 has no example: 2 examples, 3 ranks; pass force_equal_length=True"),
    ],
)
def test_training_with_fewer_examples_than_ranks(
    comm: Any, kind: str, n: int, message: str
) -> None:
    part = chainermn.scatter_dataset(KINDS[kind](n), comm, force_equal_length=False)
    for iterator in (SerialIterator, MultithreadIterator, MultiprocessIterator):
        with pytest.raises(ValueError, match=message):
            iterator(part, 1)
    with pytest.raises(ValueError, match=message):
        SerialIterator(SubDataset(TransformDataset(part, str), 0, len(part)), 1)
    assert SerialIterator(part, 1, repeat=False).epoch == 0  # for evaluation
    if n:
        equal = chainermn.scatter_dataset(KINDS[kind](n), comm)
        assert len(next(SerialIterator(equal, 1))) == 1


@pytest.mark.mpi(1, 3)
def test_without_a_seed_all_examples_are_still_there_once(comm: Any) -> None:
    part = chainermn.scatter_dataset(list(range(9)), comm, shuffle=True, force_equal_length=False)
    everything = [example for part in comm.allgather_obj(list(part)) for example in part]
    assert sorted(everything) == list(range(9))


class Series(list[Any]):
    """A column of pandas, as far as it counts here: ``[]`` finds items by an index."""

    def __init__(self, values: Any, index: Any) -> None:
        super().__init__(values)
        self.index = np.asarray(index)

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(self.index.tolist().index(key))

    def to_numpy(self) -> Any:
        return np.array(self)


class DataFrame(Series):
    """A table of pandas': ``[]`` finds its columns."""

    columns = ("a", "b")


@pytest.mark.mpi(1, 2)
def test_what_finds_its_examples_by_labels(comm: Any) -> None:
    labels = [3, 4, 5]
    for dataset, message in (
        (
            DataFrame(labels, range(3)),
            r"a DataFrame is a set of columns, .* df\.to_records\(index",
        ),
        (TupleDataset(labels, DataFrame(labels, range(3))), "a DataFrame is a set of columns"),
        (Series(labels, [2, 0, 1]), r"a Series finds examples by its index, .*: pass its to_num"),
        (SubDataset(TupleDataset(labels, Series(labels, ["a", "b", "c"])), 0, 2), "by its index"),
    ):
        with pytest.raises(TypeError, match=message):
            chainermn.scatter_dataset(dataset if comm.rank == 0 else None, comm)
    series = Series(labels, range(3))
    part = chainermn.scatter_dataset(series if comm.rank == 0 else None, comm)
    assert list(part) == {1: [[3, 4, 5]], 2: [[3, 4], [4, 5]]}[comm.size][comm.rank]


@pytest.mark.mpi(3)
@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (None, "with a length"),
        (iter([1]), "with a length"),
        (np.float32(1), "with a length"),
        ([lambda: 1], "pickle"),
        (TupleDataset([1, 2], [lambda: 1, 1]), "pickle"),
        (TransformDataset([1, 2], lambda x: x), "pickle"),
    ],
    ids=["none", "iterator", "scalar", "list", "columns", "transformed"],
)
def test_data_set_that_cannot_be_scattered(comm: Any, dataset: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        chainermn.scatter_dataset(dataset if comm.rank == 1 else [1], comm, root=1)


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize("root", [-1, 3])
def test_root_that_is_no_rank(comm: Any, root: int) -> None:
    with pytest.raises(ValueError, match=f"0 to {comm.size - 1}, got {root}"):
        chainermn.scatter_dataset([1, 2], comm, root=root)
    with pytest.raises(ValueError, match=f"0 to {comm.size - 1}, got {root}"):
        chainermn.scatter_index(2, comm, root=root)


@pytest.mark.mpi(3)
def test_roots_that_differ(comm: Any) -> None:
    with pytest.raises(ValueError, match=r"the same\. rank 0: root=0; rank 1: root=1"):
        chainermn.scatter_dataset([1, 2], comm, root=min(comm.rank, 1))


@pytest.mark.mpi(3)
def test_seed_out_of_range(comm: Any) -> None:
    with pytest.raises(ValueError, match=r"[Ss]eed must be"):
        chainermn.scatter_dataset([1, 2], comm, shuffle=True, seed=-1)


@pytest.mark.mpi(1, 3)
@PROPERTY
@given(n=st.integers(0, 20), root=st.integers(0, 3).map(np.int64), equal=st.booleans())
def test_scatter_index(comm: Any, n: int, root: Any, equal: bool) -> None:
    root %= comm.size
    given_n: Any = n if comm.rank == root else None
    begin, end = chainermn.scatter_index(given_n, comm, root, force_equal_length=equal)
    assert list(range(begin, end)) == expected_examples(n, comm.rank, comm.size, False, 0, equal)


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize(("n", "kind"), [(-1, ValueError), (2.5, TypeError), (None, TypeError)])
def test_scatter_index_of_no_number(comm: Any, n: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        chainermn.scatter_index(n, comm)


@pytest.mark.mpi(1, 3)
def test_iterations_of_an_epoch_are_those_of_rank_0(comm: Any) -> None:
    own = [0] * (7 + comm.rank)
    with pytest.warns(DeprecationWarning, match="deprecated"):
        assert chainermn.datasets.get_n_iterations_for_one_epoch(own, 2, comm) == 4
    with pytest.warns(DeprecationWarning, match="deprecated"):
        assert chainermn.datasets.get_n_iterations_for_one_epoch(own, 1, comm) == 7
    with pytest.warns(DeprecationWarning, match="deprecated"):
        trigger = chainermn.datasets.get_epoch_trigger(3, own, 2, comm)
    assert trigger == (12, "iteration")
    with (
        pytest.warns(DeprecationWarning, match="deprecated"),
        pytest.raises(ValueError, match="batch size must be positive"),
    ):
        chainermn.datasets.get_n_iterations_for_one_epoch(own, 0, comm)


def test_empty_dataset() -> None:
    dataset = chainermn.datasets.create_empty_dataset(TupleDataset(images(3), labels(3)))
    assert len(dataset) == 3
    assert dataset[1] == ()


def test_peak_memory_is_that_of_a_part() -> None:
    job = run_job(2, [HERE / "measure_scatter_memory.py"], env={"OMP_NUM_THREADS": "1"})
    assert job.returncode == 0, job.stderr
    measured = json.loads(job.stdout)
    at_root, elsewhere = measured["peak"]
    # A half plus 1.5 chunks of 8 MB; the root also holds everyone's chunks and the message.
    assert elsewhere < 0.6 * measured["data"], measured
    assert at_root < 0.77 * measured["data"], measured


@pytest.mark.mpi(3)
def test_data_that_root_cannot_read_raises_on_all_ranks(comm: Any) -> None:
    broken = chainer.datasets.SubDataset(np.arange(8), 0, 8, [0, 1, 2, 3, 4, 5, 6, 99])
    with pytest.raises((IndexError, ValueError, RuntimeError)):
        chainermn.scatter_dataset(broken if comm.rank == 0 else None, comm)
    assert comm.allreduce_obj(1) == comm.size  # nothing is left in flight
