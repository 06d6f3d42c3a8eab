"""Dependencies without values: order, gradients, second derivatives."""

from __future__ import annotations

import chainer
import chainer.functions as F
import numpy as np
import pytest

from chainermn.functions import pseudo_connect
from chainermn.functions.pseudo_connect import WithDelegate


class Witness(chainer.FunctionNode):
    """An identity that notes when its backward runs."""

    def __init__(self, name: str, seen: list[str]) -> None:
        super().__init__()
        self.name, self.seen = name, seen

    def forward(self, inputs: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        return inputs

    def backward(self, indexes: tuple[int, ...], gys: tuple) -> tuple:
        self.seen.append(self.name)
        return gys


def variable(*shape: int, dtype: str = "f8") -> chainer.Variable:
    return chainer.Variable(
        np.arange(1, 1 + np.prod(shape, dtype=int), dtype=dtype).reshape(shape)
    )


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_values_pass_and_the_delegate_gets_zeros(dtype: str, shape: tuple[int, ...]) -> None:
    delegate, x, y = variable(3, dtype="f"), variable(*shape, dtype=dtype), variable(2)
    out = pseudo_connect(delegate, x, y)
    assert isinstance(out, tuple)
    assert out[0].dtype == dtype
    np.testing.assert_array_equal(out[0].array, x.array)
    np.testing.assert_array_equal(out[1].array, y.array)
    (F.cast(F.sum(out[0]), "f8") * 2 + F.sum(out[1]) * 3).backward()
    np.testing.assert_array_equal(x.grad, np.full(shape, 2, dtype))
    np.testing.assert_array_equal(y.grad, [3, 3])
    np.testing.assert_array_equal(delegate.grad, np.zeros(3, "f"))


def test_one_variable_is_a_tuple_too() -> None:
    assert len(pseudo_connect(variable(1), variable(2))) == 1


def test_without_a_delegate_or_variables() -> None:
    x = variable(2)
    assert pseudo_connect(None, x) == (x,)
    assert pseudo_connect(x) == ()


def test_unused_outputs_have_no_gradient() -> None:
    delegate, x, y = variable(0), variable(2), variable(2)
    F.sum(pseudo_connect(delegate, x, y)[1]).backward()
    assert x.grad is None
    np.testing.assert_array_equal(y.grad, [1, 1])
    assert delegate.grad.shape == (0,)


def test_integers_connect() -> None:
    delegate = variable(2)
    (out,) = pseudo_connect(delegate, np.arange(3))
    assert out.dtype == np.int64
    out.grad = np.zeros(3, np.int64)
    out.backward()
    np.testing.assert_array_equal(delegate.grad, [0, 0])


def test_backward_from_a_delegate_without_gradient() -> None:
    seen: list[str] = []
    (first,) = Witness("first", seen).apply((variable(2),))
    delegate, _ = WithDelegate().apply((first,))
    delegate.backward()
    assert seen == ["first"]


def test_backward_runs_in_the_reverse_order() -> None:
    seen: list[str] = []
    (first,) = Witness("first", seen).apply((variable(0),))
    (x,) = pseudo_connect(first, variable(2))
    (second,) = Witness("second", seen).apply((x,))
    (y,) = pseudo_connect(second, variable(2))
    F.sum(Witness("third", seen).apply((y,))[0]).backward()
    assert seen == ["third", "second", "first"]


def test_with_delegate_is_reached_through_the_delegate_alone() -> None:
    x, y = variable(2), variable(3, dtype="f")
    delegate, *_ = WithDelegate().apply((x, y))
    assert delegate.shape == (0,)
    (out,) = pseudo_connect(delegate, variable(1))
    F.sum(out).backward()
    np.testing.assert_array_equal(x.grad, [0, 0])
    np.testing.assert_array_equal(y.grad, np.zeros(3, "f"))


def test_second_derivative() -> None:
    delegate, x = variable(1), variable(3)
    (y,) = pseudo_connect(delegate, x)
    gx, gd = chainer.grad([F.sum(y**3)], [x, delegate], enable_double_backprop=True)
    (gx,) = pseudo_connect(gd, gx)
    F.sum(gx * gx).backward()
    np.testing.assert_allclose(x.grad, 36 * x.array**3)


@pytest.mark.parametrize("wrong", [None, 3, "x", [1.0], chainer.Variable()])
def test_what_is_no_variable(wrong: object) -> None:
    with pytest.raises(TypeError, match="expected a variable"):
        pseudo_connect(variable(1), wrong)
