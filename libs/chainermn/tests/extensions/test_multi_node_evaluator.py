"""Evaluation over ranks, against means computed in one process."""

from __future__ import annotations

from typing import Any

import chainer
import numpy as np
import pytest
from chainer.iterators import SerialIterator
from chainer.training.extensions import Evaluator
from hypothesis import given, settings
from hypothesis import strategies as st

from chainermn.extensions import GenericMultiNodeEvaluator, create_multi_node_evaluator

PROPERTY = settings(max_examples=15)


class Square(chainer.Chain):
    """A model that reports the mean square of a batch."""

    def forward(self, x: np.ndarray) -> None:
        chainer.report({"square": (x**2).mean(), "train": float(chainer.config.train)}, self)


def data(rank: int, length: int) -> np.ndarray:
    return np.random.default_rng(rank).normal(size=length)


def evaluator(values: np.ndarray, batch: int = 3) -> Evaluator:
    return Evaluator(SerialIterator(values, batch, repeat=False, shuffle=False), Square())


def mean_over_batches(values: np.ndarray, batch: int = 3) -> float:
    batches = [values[i : i + batch] for i in range(0, len(values), batch)]
    return float(np.mean([(b**2).mean() for b in batches]))


@pytest.mark.mpi(1, 3)
def test_mean_over_ranks(comm: Any) -> None:
    lengths = [7, 3, 12, 1][: comm.size]
    shared = create_multi_node_evaluator(evaluator(data(comm.rank, lengths[comm.rank])), comm)
    result = shared()
    expected = np.mean([mean_over_batches(data(r, n)) for r, n in enumerate(lengths)])
    np.testing.assert_allclose(result["main/square"], expected, rtol=1e-14)
    assert result["main/train"] == 0
    assert shared() == result


@pytest.mark.mpi(1, 3)
@PROPERTY
@given(
    lengths=st.lists(st.integers(0, 7), min_size=4, max_size=4).filter(lambda ns: ns[0] > 0),
    batch=st.integers(1, 8),
)
def test_mean_over_examples(comm: Any, lengths: list[int], batch: int) -> None:
    shared = create_multi_node_evaluator(
        evaluator(data(comm.rank, lengths[comm.rank]), batch), comm, mean_over="examples"
    )
    everything = np.concatenate([data(r, n) for r, n in enumerate(lengths[: comm.size])])
    np.testing.assert_allclose(shared()["main/square"], (everything**2).mean(), rtol=1e-13)
    assert shared.eval_func is None
    assert shared.converter is chainer.dataset.concat_examples


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize("mean_over", ["ranks", "examples"])
def test_empty_shards(comm: Any, mean_over: Any) -> None:
    own = data(5, 3 if comm.rank == comm.size - 1 else 0)
    shared = create_multi_node_evaluator(evaluator(own), comm, mean_over=mean_over)
    np.testing.assert_allclose(shared()["main/square"], (data(5, 3) ** 2).mean())
    nothing = create_multi_node_evaluator(evaluator(own[:0]), comm, mean_over=mean_over)
    assert nothing() == {}


@pytest.mark.mpi(1, 3)
def test_user_defined_evaluators(comm: Any) -> None:
    class Extended(Evaluator):
        def evaluate(self) -> dict[str, Any]:
            return {**super().evaluate(), "own": comm.rank, "array": np.full(2, comm.rank, "f")}

    class Unrelated:
        def evaluate(self) -> dict[str, Any]:
            return {"a": np.float16(comm.rank), f"only {comm.rank}": comm.rank}

    iterator = SerialIterator(data(0, 4), 3, repeat=False, shuffle=False)
    extended = create_multi_node_evaluator(Extended(iterator, Square()), comm)()
    assert extended["own"] == (comm.size - 1) / 2
    assert list(extended["array"]) == [(comm.size - 1) / 2] * 2
    unrelated = create_multi_node_evaluator(Unrelated(), comm).evaluate()
    expected = {f"only {rank}": rank for rank in range(comm.size)}
    assert unrelated == {"a": (comm.size - 1) / 2, **expected}


@pytest.mark.mpi(1, 3)
def test_overridden_evaluate_is_weighted_by_examples(comm: Any) -> None:
    class Extended(Evaluator):
        def evaluate(self) -> dict[str, Any]:
            return {**super().evaluate(), "own": comm.rank}

    def function(x: np.ndarray) -> None:
        chainer.report({"mean": x.mean(), "weighted": (x.mean(), 2)})

    lengths = [4, 5, 1][: comm.size]
    iterator = SerialIterator(data(comm.rank, lengths[comm.rank]), 3, repeat=False, shuffle=False)
    shared = create_multi_node_evaluator(
        Extended(iterator, Square(), eval_func=function), comm, mean_over="examples"
    )
    everything = np.concatenate([data(r, n) for r, n in enumerate(lengths)])
    batches = [data(r, n)[i : i + 3].mean() for r, n in enumerate(lengths) for i in range(0, n, 3)]
    result = shared()
    np.testing.assert_allclose(result["mean"], everything.mean(), rtol=1e-13)
    np.testing.assert_allclose(result["weighted"], np.mean(batches), rtol=1e-13)
    np.testing.assert_allclose(result["own"], np.average(range(comm.size), weights=lengths))
    assert shared.eval_func is function


@pytest.mark.mpi(1, 3)
def test_examples_that_cannot_be_counted(comm: Any) -> None:
    class Opaque(Evaluator):
        def evaluate(self) -> dict[str, Any]:
            return {"own": 1}

    iterator = SerialIterator(data(0, 4), 3, repeat=False)
    shared = create_multi_node_evaluator(Opaque(iterator, Square()), comm, mean_over="examples")
    with pytest.raises(ValueError, match="cannot tell over how many examples 'own'"):
        shared()


@pytest.mark.mpi(3)
def test_failure_on_one_rank_raises_on_all(comm: Any) -> None:
    def function(x: np.ndarray) -> None:
        if comm.rank == 1:
            raise KeyError("lost")

    iterator = SerialIterator(data(0, 4), 3, repeat=False)
    shared = create_multi_node_evaluator(Evaluator(iterator, Square(), eval_func=function), comm)
    with pytest.raises(KeyError, match="lost"):
        shared()


def test_unknown_mean(comm: Any) -> None:
    with pytest.raises(ValueError, match="got 'batches'"):
        create_multi_node_evaluator(evaluator(data(0, 1)), comm, mean_over="batches")  # type: ignore[arg-type]


class Collected(GenericMultiNodeEvaluator):
    def calc_local(self, x: np.ndarray) -> Any:
        assert not chainer.config.train
        assert not chainer.config.enable_backprop
        return None if x[0] < 0 else x.tolist()

    def aggregate(self, results: list[Any]) -> dict[str, Any]:
        return {"results": results}


def rounds(lengths: list[int], batch: int) -> list[list[int]]:
    parts = [list(range(100 * rank, 100 * rank + n)) for rank, n in enumerate(lengths)]
    return [
        part[start : start + batch]
        for start in range(0, max(lengths), batch)
        for part in parts
        if part[start : start + batch]
    ]


@pytest.mark.mpi(1, 3)
@PROPERTY
@given(
    lengths=st.lists(st.integers(0, 7), min_size=4, max_size=4),
    batch=st.integers(1, 4),
    root=st.integers(0, 3),
)
def test_generic_evaluator(comm: Any, lengths: list[int], batch: int, root: int) -> None:
    root %= comm.size
    own = np.arange(100 * comm.rank, 100 * comm.rank + lengths[comm.rank])
    iterator = SerialIterator(own, batch, repeat=False, shuffle=False)
    seen: list[Any] = []
    shared = Collected(comm, iterator, chainer.Chain(), root=root, progress_hook=seen.append)
    for _ in range(2):
        result: Any = shared(None)
        if comm.rank == root:
            assert result == {"results": rounds(lengths[: comm.size], batch)}
        else:
            assert result is None
    assert len(seen) == (2 * -(-len(own) // batch) if comm.rank == root else 0)


@pytest.mark.mpi(1, 3)
def test_generic_evaluator_with_nothing_overridden(comm: Any) -> None:
    own = np.arange(comm.rank + 1, dtype="f")[:, None] + 10 * comm.rank
    iterator = SerialIterator(own, 1, repeat=False, shuffle=False)
    model = chainer.links.Linear(1, 1, initialW=2, initial_bias=1)
    results = GenericMultiNodeEvaluator(comm, iterator, model)(None)
    if comm.rank != 0:
        assert results is None
        return
    expected = {1: [1], 3: [1, 21, 41, 23, 43, 45]}[comm.size]
    assert [float(result.array[0, 0]) for result in results] == expected
    assert all(isinstance(result, chainer.Variable) for result in results)


def test_generic_evaluator_without_a_communicator() -> None:
    iterator = SerialIterator(np.array([1, -1, 2]), 1, repeat=False, shuffle=False)
    result = Collected(None, iterator, chainer.Chain())(None)
    assert result == {"results": [[1], [2]]}


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize("method", ["calc_local", "aggregate", "iterator.reset"])
def test_generic_evaluator_that_fails(comm: Any, method: str) -> None:
    def fail(*args: Any) -> Any:
        if comm.rank == 0:
            raise ZeroDivisionError("by design")
        return [0]

    own = np.arange(comm.rank, 3)
    shared = Collected(comm, SerialIterator(own, 1, repeat=False, shuffle=False), chainer.Chain())
    *path, name = method.split(".")
    setattr(getattr(shared, path[0]) if path else shared, name, fail)
    kind = ZeroDivisionError if comm.rank == 0 else RuntimeError
    with pytest.raises(kind, match="by design"):
        shared(None)


@pytest.mark.mpi(3)
def test_generic_evaluator_with_a_root_that_is_no_rank(comm: Any) -> None:
    iterator = SerialIterator(np.arange(3), 1, repeat=False)
    with pytest.raises(ValueError, match="must be a rank"):
        Collected(comm, iterator, chainer.Chain(), root=3)
    with pytest.raises(TypeError, match="unexpected keyword"):
        Collected(comm, iterator, chainer.Chain(), color=3)
