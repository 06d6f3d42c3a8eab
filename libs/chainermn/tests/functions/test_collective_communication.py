"""Collective calls on variables, against NumPy on the variables of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chainer
import chainer.functions as F
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import chainermn
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.functions import (
    allgather,
    allreduce,
    alltoall,
    bcast,
    gather,
    pseudo_connect,
    reduce_scatter,
    scatter,
)
from libs.chainermn.tests.functions.numerical_gradients import numerical_gradients

DTYPES = ["float16", "float32", "float64"]
SHAPES = [(), (0,), (3,), (2, 1, 2)]
alike = settings(max_examples=10)
Arrays = list[np.ndarray]


class Call:
    """A collective call and its equivalent in one process.

    Both ``inputs`` and ``outputs`` return the arrays of every rank. All calls are linear and
    real, so the gradients are those of sum(outputs * weights) with respect to the inputs.
    """

    def __init__(self, call: Callable, given: str, outputs: Callable) -> None:
        self.call, self.given, self.outputs = call, given, outputs

    def inputs(self, size: int, shape: tuple[int, ...], dtype: str, seed: int = 0) -> list[Arrays]:
        generator = np.random.default_rng(seed)
        counts = {
            "one": [1] * size,
            "each": [size] * size,
            "root": [1] + [0] * (size - 1),
            "root each": [size] + [0] * (size - 1),
        }[self.given]
        return [
            [np.asarray(generator.integers(-8, 8, shape) / 4).astype(dtype) for _ in range(count)]
            for count in counts
        ]

    def __call__(self, comm: CommunicatorBase, xs: list[Any]) -> list[chainer.Variable]:
        argument = None if not xs else list(xs) if "each" in self.given else xs[0]
        result = self.call(comm, argument)
        return list(result) if isinstance(result, tuple) else [result]


def sums(table: list[Arrays]) -> list[Arrays]:
    return [[np.sum([row[rank] for row in table], axis=0)] for rank in range(len(table))]


def everything(table: list[Arrays]) -> Arrays:
    return [row[0] for row in table]


CALLS = {
    "allgather": Call(allgather, "one", lambda xs: [everything(xs) for _ in xs]),
    "alltoall": Call(alltoall, "each", lambda xs: [list(column) for column in zip(*xs)]),  # noqa: B905
    "allreduce": Call(allreduce, "one", lambda xs: [[sum(everything(xs))] for _ in xs]),
    "mean": Call(
        lambda comm, x: allreduce(comm, x, "mean"),
        "one",
        lambda xs: [[sum(everything(xs)) / np.asarray(len(xs), xs[0][0].dtype)] for _ in xs],
    ),
    "reduce_scatter": Call(reduce_scatter, "each", sums),
    "bcast": Call(bcast, "root", lambda xs: [xs[0] for _ in xs]),
    "gather": Call(gather, "one", lambda xs: [everything(xs)] + [[] for _ in xs[1:]]),
    "scatter": Call(scatter, "root each", lambda xs: [[x] for x in xs[0]]),
}
every_call = pytest.mark.parametrize("name", CALLS)
symmetric = pytest.mark.parametrize(
    "name", ["allgather", "alltoall", "allreduce", "mean", "reduce_scatter"]
)


def weights(outputs: list[Any], rank: int) -> list[np.ndarray]:
    generator = np.random.default_rng(100 + rank)
    return [
        np.asarray(generator.integers(-8, 8, np.shape(y)) / 4).astype(y.dtype) for y in outputs
    ]


def run(comm: CommunicatorBase, ys: list[chainer.Variable]) -> None:
    """Run backward from sum(ys * weights), or from a delegate."""
    if ys[0].shape == (0,) and len(ys) == 1 and ys[0].dtype == np.float32:
        ys[0].backward()
    else:
        sum(F.sum(y * w) for y, w in zip(ys, weights(ys, comm.rank), strict=True)).backward()


def expected_gradients(call: Call, table: list[Arrays]) -> list[Arrays]:
    """Return the gradients for every input of every rank, from the definition of the call."""
    double = [[x.astype("f8") for x in row] for row in table]

    def loss(rows: list[Arrays]) -> float:
        return sum(
            float(np.sum(y * w))
            for rank, ys in enumerate(call.outputs(rows))
            for y, w in zip(ys, weights(ys, rank), strict=True)
        )

    zero = loss([[np.zeros_like(x) for x in row] for row in double])
    gradients = []
    for row in double:
        gradients.append([np.zeros_like(x) for x in row])
        for i, x in enumerate(row):
            for j in range(x.size):
                one_hot = [[np.zeros_like(other) for other in others] for others in double]
                one_hot[len(gradients) - 1][i].reshape(-1)[j] = 1
                gradients[-1][i].reshape(-1)[j] = loss(one_hot) - zero
    return gradients


def check(comm: CommunicatorBase, call: Call, table: list[Arrays]) -> None:
    xs = [chainer.Variable(array) for array in table[comm.rank]]
    ys = call(comm, xs)
    expected = call.outputs(table)[comm.rank]
    if expected:
        for y, array in zip(ys, expected, strict=True):
            assert isinstance(y, chainer.Variable)
            assert y.dtype == array.dtype
            np.testing.assert_allclose(y.array, array, rtol=1e-3 if y.dtype == "f2" else 1e-6)
    else:
        assert [(y.shape, y.dtype) for y in ys] == [((0,), np.float32)]
    run(comm, ys)
    for x, gradient in zip(xs, expected_gradients(call, table)[comm.rank], strict=True):
        assert x.grad.dtype == x.dtype
        tolerance = 2e-3 if x.dtype == "f2" else 1e-6
        np.testing.assert_allclose(x.grad, gradient, rtol=tolerance, atol=tolerance)


@pytest.mark.mpi(1, 3)
@every_call
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients(comm: CommunicatorBase, name: str, dtype: str) -> None:
    for shape in SHAPES:
        check(comm, CALLS[name], CALLS[name].inputs(comm.size, shape, dtype))


@pytest.mark.mpi(1, 3)
@every_call
@alike
@given(
    shape=hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_any_shape(name: str, shape: tuple[int, ...], dtype: str, seed: int) -> None:
    comm = chainermn.create_communicator("naive")
    check(comm, CALLS[name], CALLS[name].inputs(comm.size, shape, dtype, seed))


@pytest.mark.mpi(1, 3)
@every_call
def test_numerical_gradients(comm: CommunicatorBase, name: str) -> None:
    call = CALLS[name]
    arrays = call.inputs(comm.size, (2,), "float64")[comm.rank]

    def loss() -> chainer.Variable:
        ys = call(comm, [F.sin(chainer.as_variable(x)) for x in xs])
        if len(ys) == 1 and ys[0].shape == (0,):
            return ys[0]
        return sum(F.sum(F.exp(y * y / 8) * (i + comm.rank + 1)) for i, y in enumerate(ys))

    xs = [chainer.Variable(array) for array in arrays]
    expected = numerical_gradients(comm, lambda: loss().array.sum(), arrays)
    loss().backward()
    for x, gradient in zip(xs, expected, strict=True):
        np.testing.assert_allclose(x.grad, gradient, rtol=1e-6, atol=1e-7)


@pytest.mark.mpi(1, 3)
@symmetric
def test_second_derivative(comm: CommunicatorBase, name: str) -> None:
    call = CALLS[name]
    xs = [chainer.Variable(x) for x in call.inputs(comm.size, (2,), "float64")[comm.rank]]

    def loss() -> chainer.Variable:
        ys = call(comm, xs)
        first = sum(F.sum(F.exp(y / 2) * (comm.rank + 1)) for y in ys)
        gradients = chainer.grad([first], xs, enable_double_backprop=True)
        return sum(F.sum(F.sin(gradient / 8)) for gradient in gradients)

    expected = numerical_gradients(comm, lambda: loss().array, [x.array for x in xs])
    loss().backward()
    for x, gradient in zip(xs, expected, strict=True):
        np.testing.assert_allclose(x.grad, gradient, rtol=1e-6, atol=1e-7)


@pytest.mark.mpi(3)
@pytest.mark.parametrize("name", ["bcast", "gather", "scatter"])
def test_gradients_are_recorded_for_a_second_backward(comm: CommunicatorBase, name: str) -> None:
    call = CALLS[name]
    xs = [chainer.Variable(x) for x in call.inputs(comm.size, (2,), "float64")[comm.rank]]
    ys = call(comm, xs)
    loss = ys[0] if ys[0].shape == (0,) else sum(F.sum(y**3) for y in ys)
    loss.backward(enable_double_backprop=True)
    assert all(x.grad_var.creator is not None for x in xs)


@pytest.mark.mpi(3)
@pytest.mark.parametrize("name", ["bcast", "gather", "scatter"])
def test_every_root(comm: CommunicatorBase, name: str) -> None:
    for root in range(comm.size):
        here = comm.rank == root
        x = chainer.Variable(np.full(2, comm.rank + 1.0))
        if name == "bcast":
            y = bcast(comm, x if here else None, root)
            np.testing.assert_array_equal(y.array, [root + 1] * 2)
            F.sum(y).backward()
            assert x.grad is None if not here else (x.grad == comm.size).all()
        elif name == "gather":
            ys = gather(comm, x, root)
            if here:
                np.testing.assert_array_equal([y.array[0] for y in ys], range(1, comm.size + 1))
                sum(F.sum(y) * i for i, y in enumerate(ys)).backward()
            else:
                ys.backward()
            assert (x.grad == comm.rank).all()
        else:
            y = scatter(comm, [x * i for i in range(comm.size)] if here else None, root)
            assert (y.array == (root + 1) * comm.rank).all()
            F.sum(y).backward()
            assert x.grad is None if not here else (x.grad == sum(range(comm.size))).all()


@pytest.mark.mpi(3)
def test_shapes_may_differ_where_nothing_is_added_up(comm: CommunicatorBase) -> None:
    x = chainer.Variable(np.full((comm.rank, 2), comm.rank + 1.0))
    for ys in (allgather(comm, x), gather(comm, x, comm.size - 1)):
        x.cleargrad()
        if isinstance(ys, tuple):
            assert [y.shape for y in ys] == [(rank, 2) for rank in range(comm.size)]
            sum(F.sum(y * y) for y in ys).backward()
        else:
            ys.backward()
    np.testing.assert_array_equal(x.grad, 2 * x.array)

    xs = [chainer.Variable(np.ones((comm.rank, rank))) for rank in range(comm.size)]
    ys = alltoall(comm, xs)
    assert [y.shape for y in ys] == [(rank, comm.rank) for rank in range(comm.size)]
    sum(F.sum(y) for y in ys).backward()
    assert [x.grad.shape for x in xs] == [x.shape for x in xs]

    xs = [chainer.Variable(np.ones(rank)) for rank in range(comm.size)]
    y = reduce_scatter(comm, xs)
    np.testing.assert_array_equal(y.array, np.full(comm.rank, comm.size))
    F.sum(y * (comm.rank + 1)).backward()
    for rank, x in enumerate(xs):
        np.testing.assert_array_equal(x.grad, np.full(rank, rank + 1))


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize("name", ["alltoall", "reduce_scatter", "scatter"])
@pytest.mark.parametrize("shape", [(), (2,)])
@pytest.mark.parametrize("kind", ["array", "variable"])
def test_one_array_with_an_entry_a_rank(
    comm: CommunicatorBase, name: str, shape: tuple[int, ...], kind: str
) -> None:
    stacked = np.arange(comm.size * 2.0)[: comm.size * int(np.prod(shape))]
    stacked = stacked.reshape(comm.size, *shape)
    x = chainer.Variable(stacked) if kind == "variable" else stacked
    call = {"alltoall": alltoall, "reduce_scatter": reduce_scatter, "scatter": scatter}[name]
    result = call(comm, x)
    y = result[0] if isinstance(result, tuple) else result
    factor = comm.size if name == "reduce_scatter" else 1
    np.testing.assert_array_equal(y.array, stacked[comm.rank] * factor)
    if kind == "variable":
        results = result if isinstance(result, tuple) else (result,)
        sum(F.sum(y) for y in results).backward()
        if name != "scatter" or comm.rank == 0:
            np.testing.assert_array_equal(x.grad, np.ones_like(stacked))


@pytest.mark.mpi(1, 3)
@every_call
def test_arrays_and_integers_need_no_backward(comm: CommunicatorBase, name: str) -> None:
    call = CALLS[name]
    dtypes = ["float32"] if name == "mean" else ["float32", "int64"]
    for dtype in dtypes:
        table = call.inputs(comm.size, (2,), dtype)
        ys = call(comm, table[comm.rank])
        assert not any(y.requires_grad and y.creator is not None for y in ys)
        for y, expected in zip(ys, call.outputs(table)[comm.rank], strict=False):
            np.testing.assert_array_equal(y.array, expected)
    with chainer.no_backprop_mode():
        xs = [chainer.Variable(x) for x in call.inputs(comm.size, (2,), "float32")[comm.rank]]
        assert all(y.creator is None for y in call(comm, xs))


@pytest.mark.mpi(3)
@pytest.mark.parametrize("name", ["allgather", "allreduce", "alltoall", "gather"])
def test_if_one_rank_needs_the_gradient_all_come_to_backward(
    comm: CommunicatorBase, name: str
) -> None:
    call = CALLS[name]
    table = call.inputs(comm.size, (2,), "float64")
    xs = [chainer.Variable(x, requires_grad=comm.rank == 1) for x in table[comm.rank]]
    run(comm, call(comm, xs))
    if comm.rank == 1:
        for x, gradient in zip(xs, expected_gradients(call, table)[1], strict=True):
            np.testing.assert_allclose(x.grad, gradient)
    else:
        assert all(x.grad is None for x in xs)


@pytest.mark.mpi(2)
@pytest.mark.parametrize("name", ["allgather", "alltoall"])
def test_unused_outputs_have_zero_gradients(comm: CommunicatorBase, name: str) -> None:
    xs = [chainer.Variable(np.ones(2)) for _ in range(2)]
    ys = CALLS[name](comm, xs)
    F.sum(ys[comm.rank]).backward()
    assert (xs[comm.rank if name == "alltoall" else 0].grad == 1).all()
    if name == "alltoall":
        assert (xs[1 - comm.rank].grad == 0).all()


@pytest.mark.mpi(2)
def test_gradients_of_float16_are_added_up_in_float32(comm: CommunicatorBase) -> None:
    # 2048 + 1 is 2048 in float16.
    x = chainer.Variable(np.zeros(1, np.float16))
    y = reduce_scatter(comm, [np.full(1, [2048, 3][comm.rank], np.float16)] * 2)
    assert y.array == np.float16(2051 + 1)
    F.sum(bcast(comm, x) * np.float16([2048, 4][comm.rank])).backward()
    assert comm.rank == 1 or x.grad == 2052


@pytest.mark.mpi(3)
def test_delegate_of_gather_connects_to_a_loss(comm: CommunicatorBase) -> None:
    x = chainer.Variable(np.full(2, 3.0))
    ys = gather(comm, x * x, 1)
    own = F.sum(x)
    loss = sum(F.sum(y) for y in ys) + own if comm.rank == 1 else pseudo_connect(ys, own)[0]
    loss.backward()
    np.testing.assert_array_equal(x.grad, [7, 7])


BAD = [
    ("allgather", lambda comm: allgather(comm, None), TypeError, "expected a variable"),
    ("allgather", lambda comm: allgather(comm, [1.0]), TypeError, "expected a variable"),
    ("allgather", lambda comm: allgather(comm, chainer.Variable()), TypeError, "initialized"),
    ("allgather", lambda comm: allgather(comm, np.ones(2, "f")), ValueError, "same dtypes"),
    ("allreduce", lambda comm: allreduce(comm, "x"), TypeError, "expected a variable"),
    ("allreduce", lambda comm: allreduce(comm, np.ones(3)), ValueError, "disagree"),
    ("allreduce", lambda comm: allreduce(comm, np.ones(2, "f")), ValueError, "disagree"),
    ("alltoall", lambda comm: alltoall(comm, [np.ones(2)]), ValueError, "entries, one per rank"),
    ("alltoall", lambda comm: alltoall(comm, np.ones(())), TypeError, "single number"),
    ("alltoall", lambda comm: alltoall(comm, np.ones((0, 2))), ValueError, "got 0"),
    ("alltoall", lambda comm: alltoall(comm, None), TypeError, "expected a variable"),
    ("alltoall", lambda comm: alltoall(comm, [None] * comm.size), TypeError, "a variable"),
    (
        "alltoall",
        lambda comm: alltoall(comm, [np.ones(2, "f")] + [np.ones(2)] * (comm.size - 1)),
        ValueError,
        "one dtype, got float32, float64",
    ),
    ("reduce_scatter", lambda comm: reduce_scatter(comm, None), TypeError, "a variable"),
    (
        "reduce_scatter",
        lambda comm: reduce_scatter(comm, np.ones((comm.size, 3))),
        ValueError,
        r"reduce_scatter, shapes and dtypes: .*rank \d: float64\[3\]",
    ),
    ("gather", lambda comm: gather(comm, 3), TypeError, "expected a variable"),
    ("gather", lambda comm: gather(comm, np.ones(2, "f")), ValueError, "same dtypes"),
]


@pytest.mark.mpi(3)
@pytest.mark.parametrize("case", BAD, ids=lambda case: f"{case[0]}-{case[3]}")
def test_bad_input_of_one_rank_raises_on_every_rank(comm: CommunicatorBase, case: tuple) -> None:
    name, wrong, error, message = case
    for bad_rank in range(comm.size):
        with pytest.raises(error, match=message):
            if comm.rank == bad_rank:
                wrong(comm)
            else:
                CALLS[name](comm, CALLS[name].inputs(comm.size, (2,), "float64")[comm.rank])


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize(
    ("name", "wrong", "error"),
    [
        ("bcast", None, TypeError),
        ("bcast", [1.0], TypeError),
        ("scatter", None, TypeError),
        ("scatter", [], ValueError),
        ("scatter", [np.ones(2)] * 9, ValueError),
        ("scatter", "abc", TypeError),
    ],
)
def test_bad_input_of_the_root_raises_on_every_rank(
    comm: CommunicatorBase, name: str, wrong: object, error: type[Exception]
) -> None:
    with pytest.raises(error, match="rank 0: expected"):
        CALLS[name].call(comm, wrong)


@pytest.mark.mpi(1, 2)
@pytest.mark.parametrize("call", [bcast, gather, scatter])
@pytest.mark.parametrize("root", [-1, 7, "a", None])
def test_root_that_is_no_rank(comm: CommunicatorBase, call: Callable, root: object) -> None:
    with pytest.raises(ValueError, match=rf"root={root}: expected a root from 0 to"):
        call(comm, np.ones(2), root)


@pytest.mark.mpi(1, 2)
def test_reduction_that_is_not_linear(comm: CommunicatorBase) -> None:
    with pytest.raises(ValueError, match="op='max': expected op 'sum' or 'mean'"):
        allreduce(comm, np.ones(2), "max")


@pytest.mark.mpi(3)
def test_different_calls_raise_on_every_rank(comm: CommunicatorBase) -> None:
    x = np.ones(2)
    with pytest.raises(RuntimeError, match="rank 0: allgather; rank 1: bcast with root=0"):
        allgather(comm, x) if comm.rank == 0 else bcast(comm, x)
    with pytest.raises(RuntimeError, match=r"rank 1: bcast with root=1"):
        bcast(comm, x, comm.rank % 2)
    with pytest.raises(RuntimeError, match=r"op='sum'; rank 1: allreduce with op='mean'"):
        allreduce(comm, x, "sum" if comm.rank == 0 else "mean")


@pytest.mark.mpi(2)
def test_backward_in_different_orders_raises_on_every_rank(comm: CommunicatorBase) -> None:
    x = chainer.Variable(np.ones(2))
    if comm.rank == 0:
        loss = F.sum(allgather(comm, F.sin(F.sin(x)))[0]) + F.sum(allreduce(comm, x))
    else:
        loss = F.sum(allgather(comm, x)[0]) + F.sum(allreduce(comm, F.sin(F.sin(x))))
    with pytest.raises(RuntimeError, match="In backward, the order follows"):
        loss.backward()


@pytest.mark.mpi(2)
def test_graph_on_one_rank_only_raises_on_every_rank(comm: CommunicatorBase) -> None:
    x = chainer.Variable(np.ones(2))
    with (
        chainer.using_config("enable_backprop", comm.rank == 1),
        pytest.raises(RuntimeError, match="rank 1 needs a gradient, but rank 0 records no graph"),
    ):
        allreduce(comm, x)
