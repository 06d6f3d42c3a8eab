"""Gradients are clipped by their real norm, whatever their scale, dtype and location."""

from __future__ import annotations

from typing import Any

import chainer
import numpy as np
import pytest

import chainermn
from chainermn.optimizers import GradientClipping

GRADIENTS = {"a": np.array([3.0, 0.0, 12.0]), "b": np.array([[4.0]])}  # of norm 13


def optimizer_with(
    gradients: dict[str, np.ndarray], dtype: Any, scale: float | None, place: Any = np.array
) -> Any:
    """Return an optimizer of a model with these gradients, scaled."""
    model = chainer.Link()
    with model.init_scope():
        for name, gradient in gradients.items():
            parameter = chainer.Parameter(place(np.zeros(gradient.shape, dtype)))
            parameter.grad = place((gradient * (scale or 1)).astype(dtype))
            parameter._loss_scale = scale
            setattr(model, name, parameter)
        model.unused = chainer.Parameter(place(np.zeros(2, dtype)))
    return chainer.optimizers.SGD(1).setup(model)


def gradients_of(optimizer: Any) -> dict[str, np.ndarray]:
    parameters = optimizer.target.namedparams()
    return {name[1:]: p.grad for name, p in parameters if p.grad is not None}


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("scale", [None, 256.0])
@pytest.mark.parametrize(("threshold", "factor"), [(6.5, 0.5), (13.5, 1)])
def test_norm_of_gradients_as_they_are_without_scale(
    dtype: Any, scale: float | None, threshold: float, factor: float
) -> None:
    optimizer = optimizer_with(GRADIENTS, dtype, scale)
    GradientClipping(threshold)(optimizer)
    for name, gradient in gradients_of(optimizer).items():
        assert gradient.dtype == dtype
        expected = factor * GRADIENTS[name] * (scale or 1)
        np.testing.assert_allclose(gradient, expected, rtol=1e-3 if dtype == np.float16 else 1e-6)


def test_squares_that_float16_cannot_hold() -> None:
    optimizer = optimizer_with({"a": np.full(1000, 40.0)}, np.float16, None)
    GradientClipping(1)(optimizer)
    np.testing.assert_allclose(gradients_of(optimizer)["a"], 1000**-0.5, rtol=1e-3)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_gradients_that_are_not_finite_are_left_to_the_optimizer(bad: float) -> None:
    optimizer = optimizer_with({"a": np.array([1.0, bad])}, np.float32, None)
    GradientClipping(0.1)(optimizer)
    np.testing.assert_array_equal(gradients_of(optimizer)["a"], [1, bad])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("scale", [None, 256.0])
@pytest.mark.parametrize(
    "gradient", [[3.0, 4.0], [0.3, 0.4], [0.0, 0.0], [np.inf, 1], [np.nan, 1]]
)
def test_in_gpu_memory(
    stand_in: Any, dtype: Any, scale: float | None, gradient: list[float]
) -> None:
    gradients = {"a": np.array(gradient), "b": np.zeros(2)}
    in_host_memory, on_gpu = (
        optimizer_with(gradients, dtype, scale, place) for place in (np.array, stand_in.to_gpu)
    )
    for optimizer in (in_host_memory, on_gpu):
        GradientClipping(0.75)(optimizer)
    expected = gradients_of(in_host_memory)
    for name, found in gradients_of(on_gpu).items():
        assert stand_in.holds(found)
        assert found.dtype == dtype
        np.testing.assert_array_equal(np.asarray(found), expected[name])


def test_a_loss_scale_in_gpu_memory_is_not_read(
    stand_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(array: Any) -> bool:
        raise AssertionError("the host waits for the GPU")

    scale = stand_in.to_gpu(np.array(256, np.float32))
    monkeypatch.setattr(type(scale), "__bool__", fail, raising=False)
    optimizer = optimizer_with(GRADIENTS, np.float32, 256.0, stand_in.to_gpu)
    for parameter in optimizer.target.params():
        parameter._loss_scale = scale
    GradientClipping(6.5)(optimizer)
    for name, found in gradients_of(optimizer).items():
        np.testing.assert_array_equal(np.asarray(found), 128 * GRADIENTS[name])


@pytest.mark.mpi(1, 2, 3)
@pytest.mark.parametrize("threshold", [1.0, 100.0])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_norm_of_parts_on_several_ranks(
    comm: Any, on_gpu: bool, threshold: float, request: pytest.FixtureRequest
) -> None:
    own = {"a": np.full(4, comm.rank + 1.0)}
    norm = sum(4 * (rank + 1) ** 2 for rank in range(comm.size)) ** 0.5
    place = request.getfixturevalue("stand_in").to_gpu if on_gpu else np.array
    optimizer = optimizer_with(own, np.float32, None, place)
    GradientClipping(threshold, comm)(optimizer)
    found = gradients_of(optimizer)["a"]
    assert type(found) is type(place(0))
    np.testing.assert_allclose(found, own["a"] * min(1, threshold / norm), rtol=1e-6)


@pytest.mark.mpi(1, 3)
def test_step_is_that_of_one_process_with_the_mean_gradient(comm: Any) -> None:
    model = chainer.links.Linear(2, 1, initialW=0)
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(1), comm)
    optimizer.setup(model)
    optimizer.add_hook(GradientClipping(0.5))
    x = np.array([[3.0, 4.0]], np.float32) * (comm.rank + 1)
    for _ in range(2):  # the first one makes the ranks equal
        optimizer.update(lambda: chainer.functions.sum(model(x)))
    mean = np.array([3.0, 4.0, 1.0]) * [*2 * [(comm.size + 1) / 2], 1]
    expected = -0.5 * mean / np.linalg.norm(mean)
    np.testing.assert_allclose(model.W.array.ravel(), expected[:2], rtol=1e-5)
    np.testing.assert_allclose(model.b.array, expected[2:], rtol=1e-5)


def test_invalid_arguments() -> None:
    for threshold in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="must be positive"):
            GradientClipping(threshold)
    with pytest.raises(TypeError, match="communicator"):
        GradientClipping(1, "naive")  # type: ignore[arg-type]
