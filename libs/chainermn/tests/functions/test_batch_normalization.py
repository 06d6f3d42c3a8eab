"""Batch normalization over ranks, against chainer.functions on the concatenated batch."""

from __future__ import annotations

from collections.abc import Callable

import chainer
import chainer.functions as F
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.functions import multi_node_batch_normalization
from chainermn.functions.batch_normalization import get_communication_backend
from libs.chainermn.tests.functions.numerical_gradients import numerical_gradients

alike = settings(max_examples=12)


def normal(shape: tuple[int, ...], seed: int, dtype: str = "f8") -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=shape) * 3 + 1).astype(dtype)


def parts(sizes: list[int]) -> list[slice]:
    ends = np.cumsum(sizes)
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def check(
    comm: CommunicatorBase,
    sizes: list[int],
    rest: tuple[int, ...],
    axis: int | tuple[int, ...] | None = None,
    dtype: str = "f8",
    parameters: str = "f8",
    tolerance: float = 1e-12,
    lay: Callable[[np.ndarray], np.ndarray] = np.asarray,
) -> None:
    """Compare with float64 on the whole batch: values, statistics and all gradients.

    What lies in memory as ``lay`` returns it gives results that do, too.
    """
    whole = normal((sum(sizes), *rest), 0, dtype)
    gy = normal(whole.shape, 1, dtype)
    axes = (0, *range(2, whole.ndim)) if axis is None else np.atleast_1d(axis)
    shape = tuple(length for i, length in enumerate(whole.shape) if i not in axes)
    gamma, beta, mean, var = (abs(normal(shape, seed, parameters)) for seed in range(2, 6))

    x, g, b = (chainer.Variable(v.astype("f8")) for v in (whole, gamma, beta))
    means = [mean.astype("f8"), var.astype("f8")]
    y = F.batch_normalization(
        x, g, b, eps=1e-3, running_mean=means[0], running_var=means[1], decay=0.7, axis=axis
    )
    F.sum(y * gy.astype("f8")).backward()

    part = parts(sizes)[comm.rank]
    own_x, own_g, own_b = (chainer.Variable(v) for v in (lay(whole[part]), gamma, beta))
    own_y = multi_node_batch_normalization(
        own_x, own_g, own_b, comm, 1e-3, mean, var, decay=0.7, axis=axis
    )
    own_y.grad = lay(gy[part])
    own_y.backward()
    if own_x.size:
        assert own_y.array.strides == own_x.grad.strides == own_x.array.strides

    assert (own_y.dtype, own_x.grad.dtype) == (dtype, dtype)
    assert own_g.grad.dtype == own_b.grad.dtype == mean.dtype == parameters
    for own, expected in [
        (own_y.array, y.array[part]),
        (own_x.grad, x.grad[part]),
        (own_g.grad, g.grad / comm.size),
        (own_b.grad, b.grad / comm.size),
        (mean, means[0]),
        (var, means[1]),
    ]:
        np.testing.assert_allclose(own, expected, rtol=tolerance, atol=tolerance)


def unequal(size: int) -> list[int]:
    return [3, 1, 0, 4][:size]


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize("rest", [(3,), (3, 2), (2, 3, 2)])
@pytest.mark.parametrize("batches", ["equal", "unequal"])
def test_is_batch_normalization_of_the_whole_batch(
    comm: CommunicatorBase, rest: tuple[int, ...], batches: str
) -> None:
    check(comm, [4] * comm.size if batches == "equal" else unequal(comm.size), rest)


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize("axis", [0, (0,), (0, 1), (0, 2), (0, 1, 2)])
def test_axis(comm: CommunicatorBase, axis: int | tuple[int, ...]) -> None:
    check(comm, unequal(comm.size), (3, 2, 2), axis)


@pytest.mark.mpi(1, 2)
def test_one_channel_without_an_axis(comm: CommunicatorBase) -> None:
    x = chainer.Variable(normal((4, 3), 0)[comm.rank * 2 :])
    gamma, beta = chainer.Variable(np.array(2.0)), chainer.Variable(np.array(1.0))
    y = multi_node_batch_normalization(x, gamma, beta, comm, axis=(0, 1))
    whole = np.concatenate(comm.allgather_obj(x.array))
    expected = (x.array - whole.mean()) / np.sqrt(whole.var() + 2e-5) * 2 + 1
    np.testing.assert_allclose(y.array, expected)
    F.sum(y).backward()
    np.testing.assert_allclose(x.grad, np.zeros_like(x.array), atol=1e-12)
    assert gamma.grad.shape == ()
    np.testing.assert_allclose(beta.grad, whole.size / comm.size)


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize(
    ("dtype", "parameters", "tolerance"),
    [("f4", "f4", 1e-5), ("f2", "f4", 1e-2), ("f2", "f2", 2e-2), ("f4", "f8", 1e-5)],
)
def test_dtypes(comm: CommunicatorBase, dtype: str, parameters: str, tolerance: float) -> None:
    check(
        comm,
        unequal(comm.size),
        (3, 2),
        dtype=dtype,
        parameters=parameters,
        tolerance=tolerance,
    )


def channels_last(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)


@pytest.mark.mpi(1, 2)
@pytest.mark.parametrize(("dtype", "tolerance"), [("f2", 1e-2), ("f4", 1e-4), ("f8", 1e-12)])
@pytest.mark.parametrize("rest", [(3, 40, 40), (2, 1031, 1), (4, 2, 3)])
def test_channels_last(
    comm: CommunicatorBase, dtype: str, tolerance: float, rest: tuple[int, ...]
) -> None:
    parameters = "f8" if dtype == "f8" else "f4"
    for lay in (channels_last, np.asarray):
        check(comm, unequal(comm.size), rest, None, dtype, parameters, tolerance, lay)


@pytest.mark.mpi(1)
def test_many_rows_of_channels_are_added_up_in_groups(comm: CommunicatorBase) -> None:
    """One after the other, 131,072 float16 numbers would give a mean that is wrong by 3e-6."""
    x = channels_last((np.random.default_rng(0).random((2, 4, 256, 256)) + 1).astype("f2"))
    mean, var = np.zeros(4, "f4"), np.zeros(4, "f4")
    gamma, beta = np.ones(4, "f4"), np.zeros(4, "f4")
    multi_node_batch_normalization(x, gamma, beta, comm, 1e-5, mean, var, decay=0)
    np.testing.assert_allclose(mean, x.mean((0, 2, 3), dtype="f8"), rtol=1.5e-6)


@pytest.mark.mpi(1)
def test_gradients_that_lie_otherwise_and_second_derivatives(comm: CommunicatorBase) -> None:
    def found(lay: Callable[[np.ndarray], np.ndarray]) -> list[np.ndarray]:
        x = chainer.Variable(lay(normal((3, 2, 4, 2), 0)))
        y = multi_node_batch_normalization(x, np.ones(2), np.zeros(2), comm)
        y.grad = normal(x.shape, 1)
        y.backward()
        (gx,) = chainer.grad([F.sum(y**3)], [x], enable_double_backprop=True)
        (ggx,) = chainer.grad([F.sum(gx**2)], [x])
        return [y.array, x.grad, gx.array, ggx.array]

    for one, other in zip(found(channels_last), found(np.asarray), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.mpi(1, 3)
@alike
@given(
    sizes=st.lists(st.integers(0, 4), min_size=4, max_size=4),
    rest=st.lists(st.integers(1, 3), min_size=1, max_size=3),
)
def test_any_shape(comm: CommunicatorBase, sizes: list[int], rest: list[int]) -> None:
    assume(sum(sizes[: comm.size]) > 1)
    check(comm, sizes[: comm.size], tuple(rest))


@pytest.mark.mpi(2)
def test_large_means_cost_no_digits(comm: CommunicatorBase) -> None:
    x = normal((8, 2), 0) + 1e7
    ones, zeros = np.ones(2), np.zeros(2)
    expected = F.batch_normalization(x, ones, zeros).array
    y = multi_node_batch_normalization(x[comm.rank * 4 :][:4], ones, zeros, comm)
    np.testing.assert_allclose(y.array, expected[comm.rank * 4 :][:4], rtol=1e-7, atol=1e-7)


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize("batches", ["equal", "unequal"])
def test_numerical_gradient(comm: CommunicatorBase, batches: str) -> None:
    sizes = [2] * comm.size if batches == "equal" else unequal(comm.size)
    x = chainer.Variable(normal((sizes[comm.rank], 2), comm.rank))
    gamma, beta = np.array([0.5, 2.0]), np.array([1.0, -1.0])
    weights = normal(x.shape, 7 + comm.rank)

    def loss() -> chainer.Variable:
        return F.sum(F.sin(multi_node_batch_normalization(x, gamma, beta, comm) / 2) * weights)

    expected = numerical_gradients(comm, lambda: loss().array, [x.array])
    loss().backward()
    np.testing.assert_allclose(x.grad, expected[0], rtol=1e-6, atol=1e-8)


@pytest.mark.mpi(1, 3)
def test_second_derivative(comm: CommunicatorBase) -> None:
    sizes = unequal(comm.size)
    x = chainer.Variable(normal((sizes[comm.rank], 2), comm.rank))
    gamma, beta = np.array([0.5, 2.0]), np.array([1.0, -1.0])

    def loss() -> chainer.Variable:
        y = multi_node_batch_normalization(x, gamma, beta, comm)
        (gx,) = chainer.grad([F.sum(F.exp(y / 2))], [x], enable_double_backprop=True)
        return F.sum(F.sin(gx))

    expected = numerical_gradients(comm, lambda: loss().array, [x.array])
    loss().backward()
    np.testing.assert_allclose(x.grad, expected[0], rtol=1e-5, atol=1e-7)


@pytest.mark.mpi(2)
def test_backward_for_double_backprop_has_the_same_values(comm: CommunicatorBase) -> None:
    gradients = []
    for again in (False, True):
        x = chainer.Variable(normal((3 + comm.rank, 2), comm.rank, "f4"))
        gamma, beta = chainer.Variable(np.ones(2, "f4")), chainer.Variable(np.zeros(2, "f4"))
        y = multi_node_batch_normalization(x, gamma, beta, comm)
        F.sum(F.exp(y)).backward(enable_double_backprop=again)
        gradients.append([x.grad, gamma.grad, beta.grad])
    for one, other in zip(*gradients, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.mpi(1, 2)
def test_one_sample_on_all_ranks_warns_on_every_rank(comm: CommunicatorBase) -> None:
    x = np.ones((int(comm.rank == 0), 3))
    with pytest.warns(UserWarning, match="one sample on all ranks"):
        y = multi_node_batch_normalization(x, np.ones(3), np.full(3, 2.0), comm)
    np.testing.assert_array_equal(y.array, np.full(x.shape, 2.0))


@pytest.mark.mpi(1, 2)
def test_no_sample_at_all_raises_on_every_rank(comm: CommunicatorBase) -> None:
    with pytest.raises(ValueError, match="the batch is empty on every rank"):
        multi_node_batch_normalization(np.ones((0, 3)), np.ones(3), np.ones(3), comm)


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize(
    ("x", "gamma", "beta", "axis", "error", "message"),
    [
        (None, np.ones(3), np.ones(3), None, TypeError, "expected a variable"),
        (np.ones((2, 3), int), np.ones(3), np.ones(3), None, TypeError, "x of a float dtype"),
        (np.ones((2, 4)), np.ones(3), np.ones(3), None, ValueError, r"of shape \(4,\)"),
        (np.ones((2, 3)), np.ones(3), np.ones(2), None, ValueError, r"float64\[2\]"),
        (np.ones((2, 3)), np.ones(3), np.ones(3, "f"), None, ValueError, r"float32\[3\]"),
        (np.ones((2, 3)), np.ones(3), np.ones(3), 5, ValueError, "expected axes of x"),
        (np.ones((2, 3)), np.ones(3), np.ones(3), (), ValueError, "expected axes of x"),
    ],
)
def test_bad_input_of_one_rank_raises_on_every_rank(
    comm: CommunicatorBase,
    x: object,
    gamma: object,
    beta: object,
    axis: object,
    error: type[Exception],
    message: str,
) -> None:
    bad = comm.size - 1
    good = (np.ones((2, 3)), np.ones(3), np.ones(3), None)
    *inputs, axis = (x, gamma, beta, axis) if comm.rank == bad else good
    with pytest.raises(error, match=f"rank {bad}: .*{message}"):
        multi_node_batch_normalization(*inputs, comm, axis=axis)


@pytest.mark.mpi(2)
def test_different_channels_raise_on_every_rank(comm: CommunicatorBase) -> None:
    channels = 3 + comm.rank
    with pytest.raises(ValueError, match=r"rank 0: an array float64\[3\]; rank 1: .*\[4\]"):
        multi_node_batch_normalization(
            np.ones((2, channels)), np.ones(channels), np.ones(channels), comm
        )


@pytest.mark.mpi(1, 2)
def test_communication_backend(comm: CommunicatorBase) -> None:
    assert get_communication_backend(comm) == get_communication_backend(comm, "mpi") == "mpi"
    with pytest.raises(ValueError, match="NaiveCommunicator does not use NCCL; use 'auto'"):
        get_communication_backend(comm, "nccl")
    with pytest.raises(ValueError, match=f"got 'gloo' on rank {comm.rank}"):
        get_communication_backend(comm, "gloo")
