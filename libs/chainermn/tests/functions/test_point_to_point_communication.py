"""Variables sent from rank to rank, against values known without communication."""

from __future__ import annotations

import chainer
import chainer.functions as F
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.functions import pseudo_connect, recv, send
from chainermn.functions.point_to_point_communication import Recv, Send
from libs.chainermn.tests.functions.numerical_gradients import numerical_gradients

pytestmark = pytest.mark.each_mpi

FLOATS = ["float16", "float32", "float64"]
alike = settings(max_examples=25)


def values(shape: tuple[int, ...], seed: int, dtype: str = "f8") -> np.ndarray:
    return np.asarray(np.random.default_rng(seed).normal(size=shape)).astype(dtype)


def through_all_ranks(comm: CommunicatorBase, x: chainer.Variable) -> chainer.Variable:
    """Multiply by rank + 2 and add the square, on one rank after another."""
    if comm.rank > 0:
        x = recv(comm, comm.rank - 1)
    y = x * (comm.rank + 2) + x * x
    return send(y, comm, comm.rank + 1) if comm.rank < comm.size - 1 else y


@pytest.mark.mpi(2, 3, 4)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(), (1,), (0, 2), (2, 3)])
def test_pipeline(comm: CommunicatorBase, dtype: str, shape: tuple[int, ...]) -> None:
    x = chainer.Variable(np.asarray(values(shape, 0, dtype) / 8))
    y = through_all_ranks(comm, x)
    alone = expected = chainer.Variable(x.array.copy())
    for rank in range(comm.size):
        expected = expected * (rank + 2) + expected * expected
    if comm.rank == comm.size - 1:
        assert y.dtype == dtype
        np.testing.assert_array_equal(y.array, expected.array)
        F.sum(y).backward()
    else:
        assert (y.shape, y.dtype) == ((0,), np.float32)
        y.backward()
    F.sum(expected).backward()
    if comm.rank == 0:
        assert x.grad.dtype == dtype
        np.testing.assert_array_equal(x.grad, alone.grad)


@pytest.mark.mpi(2, 3, 4)
@pytest.mark.parametrize("shape", [(), (3,)])
def test_numerical_gradients(comm: CommunicatorBase, shape: tuple[int, ...]) -> None:
    arrays = [np.asarray(values(shape, 1) / 16)] if comm.rank == 0 else []
    x = chainer.Variable(arrays[0]) if arrays else None

    def loss() -> chainer.Variable:
        y = through_all_ranks(comm, x)
        return F.sum(F.sin(y)) if comm.rank == comm.size - 1 else y

    # A delegate has no elements, so its sum is zero.
    expected = numerical_gradients(comm, lambda: loss().array.sum(), arrays)
    loss().backward()
    if comm.rank == 0:
        np.testing.assert_allclose(x.grad, expected[0], rtol=1e-6, atol=1e-7)


arrays_of_floats = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3).flatmap(
    lambda shape: st.sampled_from(FLOATS).flatmap(
        lambda dtype: hnp.arrays(dtype, shape, elements=st.floats(-4, 4, width=16))
    )
)


@pytest.mark.mpi(2)
@alike
@given(arrays=st.lists(arrays_of_floats, min_size=1, max_size=4), tag=st.integers(0, 99))
def test_any_shapes_and_dtypes(comm: CommunicatorBase, arrays: list[np.ndarray], tag: int) -> None:
    if comm.rank == 0:
        xs = [chainer.Variable(array) for array in arrays]
        send(xs, comm, 1, tag).backward()
        for x in xs:
            assert x.grad.dtype == x.dtype
            np.testing.assert_array_equal(x.grad, x.array * 2)
    else:
        ys = recv(comm, 0, tag=tag, force_tuple=True)
        for y, array in zip(ys, arrays, strict=True):
            assert y.dtype == array.dtype
            np.testing.assert_array_equal(y.array, array)
        sum(F.cast(F.sum(y * y), "f8") for y in ys).backward()


@pytest.mark.mpi(2)
@pytest.mark.parametrize("kind", [list, tuple])
def test_one_in_a_sequence_comes_as_a_variable_or_a_tuple(
    comm: CommunicatorBase, kind: type
) -> None:
    if comm.rank == 0:
        send(kind([np.ones(2)]), comm, 1)
        send(np.ones(2), comm, 1)
    else:
        assert isinstance(recv(comm, 0), chainer.Variable)
        assert isinstance(recv(comm, 0, force_tuple=True), tuple)


@pytest.mark.mpi(2, 3)
def test_there_and_back_needs_the_delegate(comm: CommunicatorBase) -> None:
    x = chainer.Variable(values((3,), 2))
    if comm.rank == 0:
        phi = send(x, comm, 1)
        y = recv(comm, 1, phi)
        F.sum(y * y).backward()
        np.testing.assert_allclose(x.grad, 4 * x.array**3, rtol=1e-14)
    elif comm.rank == 1:
        y = recv(comm, 0)
        send(y * y, comm, 0).backward()


@pytest.mark.mpi(2)
def test_large_arrays(comm: CommunicatorBase) -> None:
    """The arrays are so large that MPI's send waits for the receiver, in backward too."""
    x = chainer.Variable(values((1_000_000,), 4))
    if comm.rank == 0:
        F.sum(recv(comm, 1, send(x, comm, 1)) * 2).backward()
        assert (x.grad == 6).all()
    else:
        send(recv(comm, 0) * 3, comm, 0).backward()


@pytest.mark.mpi(2)
def test_delegates_of_any_shape_get_zeros(comm: CommunicatorBase) -> None:
    if comm.rank == 0:
        send(chainer.Variable(np.ones(2)), comm, 1).backward()
    else:
        delegate = chainer.Variable(np.ones((2, 3), np.float16))
        F.sum(recv(comm, 0, delegate)).backward()
        np.testing.assert_array_equal(delegate.grad, np.zeros((2, 3), np.float16))


@pytest.mark.mpi(2)
def test_unused_of_several_get_zeros(comm: CommunicatorBase) -> None:
    if comm.rank == 0:
        x, y = chainer.Variable(np.ones(2)), chainer.Variable(np.ones((), "f"))
        send((x, y), comm, 1).backward()
        np.testing.assert_array_equal(x.grad, [0, 0])
        assert y.grad == 1
    else:
        recv(comm, 0)[1].backward()


@pytest.mark.mpi(2)
def test_pseudo_connect_reaches_what_is_not_used_at_all(comm: CommunicatorBase) -> None:
    if comm.rank == 0:
        x = chainer.Variable(np.ones(2))
        send(x, comm, 1).backward()
        np.testing.assert_array_equal(x.grad, [0, 0])
    else:
        unused, loss = recv(comm, 0), chainer.Variable(np.ones(()))
        pseudo_connect(unused, loss)[0].backward()


@pytest.mark.mpi(2)
def test_only_wanted_gradients_travel(comm: CommunicatorBase) -> None:
    if comm.rank == 0:
        labels = chainer.Variable(np.arange(3))
        data = chainer.Variable(np.ones(3), requires_grad=False)
        x = chainer.Variable(np.ones(3))
        send((labels, data, x, np.array([True])), comm, 1).backward()
        assert labels.grad is None and data.grad is None
        np.testing.assert_array_equal(x.grad, [0, 1, 2])
    else:
        labels, data, x, flag = recv(comm, 0)
        assert labels.dtype == np.int64 and flag.dtype == bool
        F.sum(x * labels.array * data).backward()


@pytest.mark.mpi(2)
@pytest.mark.parametrize("how", ["array", "no_backprop_mode"])
def test_without_any_gradient_backward_sends_nothing(comm: CommunicatorBase, how: str) -> None:
    if comm.rank == 0:
        with chainer.using_config("enable_backprop", how == "array"):
            x = np.ones(3) if how == "array" else chainer.Variable(np.ones(3))
            send(x, comm, 1).backward()
    else:
        w = chainer.Variable(np.ones(3))
        x = recv(comm, 0)
        assert not x.requires_grad
        F.sum(x * w).backward()
        np.testing.assert_array_equal(w.grad, [1, 1, 1])


@pytest.mark.mpi(2)
def test_no_gradient_but_a_delegate_to_pass_by(comm: CommunicatorBase) -> None:
    if comm.rank == 0:
        x = chainer.Variable(np.ones(3))
        phi = send(x, comm, 1)
        F.sum(recv(comm, 1, phi)).backward()
        np.testing.assert_array_equal(x.grad, [5, 5, 5])
    else:
        y = recv(comm, 0)
        send(np.ones(2), comm, 0)
        F.sum(y * 5).backward()


@pytest.mark.mpi(2)
def test_tags_tell_messages_apart(comm: CommunicatorBase) -> None:
    if comm.rank == 0:
        a, b = chainer.Variable(np.full(2, 1.0)), chainer.Variable(np.full(2, 2.0))
        phi = send(a, comm, 1, tag=1)
        (b_,) = pseudo_connect(phi, b)
        send(b_, comm, 1, tag=2).backward()
        np.testing.assert_array_equal(a.grad, [3, 3])
        np.testing.assert_array_equal(b.grad, [4, 4])
    else:
        b = recv(comm, 0, tag=2)
        a = recv(comm, 0, tag=1)
        # Like the messages, the gradients do not wait for each other: they are small.
        F.sum(a * 3 + b * 4).backward()


@pytest.mark.mpi(2)
def test_gradients_in_another_order_are_not_mixed_up(comm: CommunicatorBase) -> None:
    if comm.rank == 0:
        a, b = chainer.Variable(np.ones(2)), chainer.Variable(np.ones(2))
        (b,) = pseudo_connect(send(a, comm, 1), b)
        phi = send(b, comm, 1)
        with pytest.raises(RuntimeError, match="rank 0 waits for the gradients of message"):
            phi.backward()
        comm.recv(1)
        comm.recv_obj(1)
        comm.recv(1)
    else:
        a = recv(comm, 0)
        b = recv(comm, 0)
        F.sum(F.sin(F.sin(b)) + a).backward()
    comm.allgather_obj(None)


@pytest.mark.mpi(2)
def test_the_delegate_puts_gradients_in_order(comm: CommunicatorBase) -> None:
    if comm.rank == 0:
        a, b = chainer.Variable(np.ones(2)), chainer.Variable(np.ones(2))
        (b_,) = pseudo_connect(send(a, comm, 1), b)
        send(b_, comm, 1).backward()
        np.testing.assert_array_equal(b.grad, [2, 2])
        np.testing.assert_allclose(a.grad, np.cos(1) * np.cos(np.sin(1)))
    else:
        a = recv(comm, 0)
        b = recv(comm, 0, a)
        F.sum(F.sin(F.sin(a)) + 2 * b).backward()


@pytest.mark.mpi(2)
def test_second_derivative(comm: CommunicatorBase) -> None:
    if comm.rank == 0:
        x = chainer.Variable(values((3,), 3))
        phi = send(x, comm, 1)
        (gx,) = chainer.grad([phi], [x], enable_double_backprop=True)
        np.testing.assert_allclose(gx.array, 3 * x.array**2)
        (loss,) = pseudo_connect(phi, F.sum(gx * gx))
        loss.backward()
        np.testing.assert_allclose(x.grad, 36 * x.array**3)
    else:
        delegate = chainer.Variable(np.zeros(0, "f"))
        y = recv(comm, 0, delegate)
        (gdelegate,) = chainer.grad([F.sum(y**3)], [delegate], enable_double_backprop=True)
        gdelegate.backward()


@pytest.mark.mpi(1, 2)
def test_own_rank(comm: CommunicatorBase) -> None:
    with pytest.raises(ValueError, match=f"send on rank {comm.rank}: the other rank is this"):
        send(np.ones(2), comm, comm.rank)
    with pytest.raises(ValueError, match=f"recv on rank {comm.rank}: the other rank is this"):
        recv(comm, comm.rank)


@pytest.mark.mpi(1, 2)
@pytest.mark.parametrize("rank", [-1, 9])
def test_no_such_rank(comm: CommunicatorBase, rank: int) -> None:
    with pytest.raises(ValueError, match=rf"expected a rank from 0 to {comm.size - 1}, got"):
        send(np.ones(2), comm, rank)
    with pytest.raises(ValueError, match=rf"expected a rank from 0 to {comm.size - 1}, got"):
        recv(comm, rank)


@pytest.mark.mpi(2)
@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (None, TypeError),
        (1.5, TypeError),
        ("x", TypeError),
        ([], ValueError),
        ([np.ones(2), None], TypeError),
        (chainer.Variable(), TypeError),
        (np.array(["x"]), TypeError),
    ],
    ids=str,
)
def test_wrong_input_raises_on_both_ranks(
    comm: CommunicatorBase, wrong: object, error: type[Exception]
) -> None:
    with pytest.raises(error, match="rank 0: expected"):
        send(wrong, comm, 1) if comm.rank == 0 else recv(comm, 0)
    if comm.rank == 0:
        send(np.ones(2), comm, 1)
    else:
        np.testing.assert_array_equal(recv(comm, 0).array, [1, 1])


@pytest.mark.mpi(2)
def test_nodes_name_their_peer(comm: CommunicatorBase) -> None:
    if comm.rank == 0:
        node = send(chainer.Variable(np.ones(2)), comm, 1).creator_node
        assert isinstance(node, Send)
        assert node.label == "Send (peer_rank: 1)"
    else:
        node = recv(comm, 0).creator_node
        assert isinstance(node, Recv)
        assert node.label == "Recv (peer_rank: 0)"
