"""Parameters and gradients of whole models, against values computed in one process."""

from __future__ import annotations

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

import chainermn
from chainermn.communicators import registered
from chainermn.communicators.communicator_base import CommunicatorBase

pytestmark = pytest.mark.each_mpi

EXCHANGING = [
    name for name, kind in registered().items() if name != "dummy" and not kind.uses_nccl
]


class Model(chainer.Chain):
    """Parameters of several shapes, including a 0-d and an empty one."""

    def __init__(self, dtype: str = "float32") -> None:
        super().__init__()
        with self.init_scope():
            for name, shape in {"a": (2, 3), "b": (), "c": (5,), "d": (0, 4)}.items():
                setattr(self, name, chainer.Parameter(np.zeros(shape, dtype)))
            self.lazy = chainer.Parameter()


def fill(model: chainer.Link, seed: int, attribute: str) -> None:
    generator = np.random.default_rng(seed)
    for _, parameter in sorted(model.namedparams()):
        if parameter.array is not None:
            values = generator.normal(size=parameter.shape).astype(parameter.dtype)
            setattr(parameter, attribute, values)


def values(model: chainer.Link, attribute: str) -> dict[str, np.ndarray]:
    return {
        name: getattr(parameter, attribute)
        for name, parameter in model.namedparams()
        if parameter.array is not None
    }


@pytest.mark.mpi(1, 2, 3, 4)
@pytest.mark.parametrize("name", EXCHANGING)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_mean_grad(name: str, dtype: str) -> None:
    comm = chainermn.create_communicator(name)
    model = Model(dtype)
    replicas = []
    for rank in range(comm.size):
        replica = Model(dtype)
        fill(replica, rank, "grad")
        replicas.append(values(replica, "grad"))
    fill(model, comm.rank, "grad")
    comm.multi_node_mean_grad(model)
    tolerance = {"float16": 1e-3, "float32": 1e-6, "float64": 1e-15}[dtype]
    for key, grad in values(model, "grad").items():
        expected = np.mean([replica[key].astype("f8") for replica in replicas], axis=0)
        assert grad.dtype == dtype
        np.testing.assert_allclose(grad, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.mpi(1, 2, 3, 4)
@pytest.mark.parametrize("name", EXCHANGING)
@pytest.mark.parametrize("wire", ["float16", "float32", "float64"])
def test_mean_grad_in_another_dtype_on_the_wire(name: str, wire: str) -> None:
    comm = chainermn.create_communicator(name, allreduce_grad_dtype=wire)
    model = Model()
    # Multiples of 0.5, which are exact in float16, as are their sum and mean.
    for parameter in (model.a, model.b, model.c, model.d):
        parameter.grad = np.full(parameter.shape, comm.size * (comm.rank + 0.5), "f")
    comm.multi_node_mean_grad(model)
    for parameter in (model.a, model.b, model.c, model.d):
        assert parameter.grad.dtype == np.float32
        assert (parameter.grad == comm.size**2 / 2).all()


@pytest.mark.mpi(1, 2, 3, 4)
@pytest.mark.parametrize("name", EXCHANGING)
@pytest.mark.parametrize("wire", [None, "float32"])
def test_gradients_of_several_dtypes(name: str, wire: str | None) -> None:
    """Average gradients such as those of a ``mixed16`` model with float32 normalization layers."""
    comm = chainermn.create_communicator(name, allreduce_grad_dtype=wire)
    model = chainer.Chain()
    for index, dtype in enumerate(["float16", "float32", "float16", "float64"]):
        with model.init_scope():
            parameter = chainer.Parameter(np.zeros(3, dtype))
            setattr(model, f"p{index}", parameter)
        parameter.grad = np.array([1, 2, 3], dtype) * comm.size * (comm.rank + index)
    comm.multi_node_mean_grad(model)
    for index, dtype in enumerate(["float16", "float32", "float16", "float64"]):
        grad = getattr(model, f"p{index}").grad
        assert grad.dtype == dtype
        factor = sum(rank + index for rank in range(comm.size))
        np.testing.assert_array_equal(grad, np.array([1, 2, 3]) * factor)


@pytest.mark.mpi(3)
@pytest.mark.parametrize("name", EXCHANGING)
def test_models_of_several_sizes(name: str) -> None:
    """Use one communicator for models of several sizes: what it keeps must fit each one."""
    comm = chainermn.create_communicator(name)
    for n in (2, 7, 3):
        model = chainer.Sequential(L.Linear(n, n), L.Linear(n, 1))
        for _, parameter in model.namedparams():
            parameter.grad = np.full(parameter.shape, n + comm.rank, "f4")
        comm.multi_node_mean_grad(model)
        for grad in values(model, "grad").values():
            np.testing.assert_array_equal(grad, n + 1)


@pytest.mark.mpi(2)
def test_float16_sums_do_not_overflow() -> None:
    comm = chainermn.create_communicator("flat")
    model = Model("float16")
    fill(model, 0, "grad")
    model.a.grad[...] = 60000
    comm.multi_node_mean_grad(model)
    assert (model.a.grad == np.float16(60000)).all()


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize("name", EXCHANGING)
def test_gradient_shared_by_two_parameters_is_averaged_once(name: str) -> None:
    comm = chainermn.create_communicator(name)
    model = Model()
    shared = np.full((2, 3), comm.rank, "f")
    model.a.grad = shared
    with model.init_scope():
        model.twin = chainer.Parameter(np.zeros((2, 3), "f"))
        model.slice = chainer.Parameter(np.zeros((1, 3), "f"))
        model.constant = chainer.Parameter(np.zeros((4, 4), "f"))
        model.strided = chainer.Parameter(np.zeros((3, 2), "f"))
    model.twin.grad = shared
    model.slice.grad = shared[1:]
    model.constant.grad = np.broadcast_to(np.float32(comm.rank), (4, 4))
    model.strided.grad = np.full((2, 3), comm.rank, "f").T
    comm.multi_node_mean_grad(model)
    for parameter in (model.a, model.twin, model.slice, model.constant, model.strided):
        assert (parameter.grad == (comm.size - 1) / 2).all()


@pytest.mark.mpi(1, 2, 3)
@pytest.mark.parametrize("name", EXCHANGING)
def test_zero_fill(name: str) -> None:
    comm = chainermn.create_communicator(name)
    model = Model()
    if comm.rank == 0:
        model.a.grad = np.ones((2, 3), "f")
    comm.multi_node_mean_grad(model, zero_fill=True)
    np.testing.assert_array_equal(model.a.grad, np.full((2, 3), np.float32(1) / comm.size))
    assert (model.c.grad == 0).all()


@pytest.mark.mpi(3)
@pytest.mark.parametrize(("with_gradient", "named"), [({0, 2}, "rank 1"), ({1}, "ranks 0, 2")])
def test_missing_gradient_without_zero_fill_is_named_on_all_ranks(
    comm: CommunicatorBase, with_gradient: set[int], named: str
) -> None:
    model = Model()
    if comm.rank in with_gradient:
        model.c.grad = np.ones(5, "f")
    with pytest.raises(ValueError, match=f"/c has no gradient on {named}, .*zero_fill=True"):
        comm.multi_node_mean_grad(model)


@pytest.mark.mpi(2, 3)
@pytest.mark.parametrize("method", ["bcast_data", "multi_node_mean_grad"])
def test_models_that_differ(comm: CommunicatorBase, method: str) -> None:
    model = Model()
    fill(model, 0, "grad")
    if comm.rank == 1:
        model.c = chainer.Parameter(np.zeros(6, "f"))
        model.c.grad = np.zeros(6, "f")
    message = r"first difference is rank 0: /c float32\[5\]; rank 1: /c float32\[6\]"
    with pytest.raises(ValueError, match=message):
        getattr(comm, method)(model)


@pytest.mark.mpi(2)
@pytest.mark.parametrize("method", ["bcast_data", "multi_node_mean_grad"])
def test_models_with_another_number_of_parameters(comm: CommunicatorBase, method: str) -> None:
    model = Model()
    fill(model, 0, "grad")
    if comm.rank == 1:
        with model.init_scope():
            model.z = chainer.Parameter(np.zeros(1, "f"))
    with pytest.raises(ValueError, match="rank 0: no further parameter; rank 1: /z"):
        getattr(comm, method)(model)


@pytest.mark.mpi(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_bcast_data(comm: CommunicatorBase, dtype: str) -> None:
    model, expected = Model(dtype), Model(dtype)
    fill(model, comm.rank, "array")
    fill(expected, 0, "array")
    comm.bcast_data(model)
    for key, array in values(expected, "array").items():
        np.testing.assert_array_equal(values(model, "array")[key], array, strict=True)
    assert model.lazy.array is None


@pytest.mark.mpi(2, 3)
@pytest.mark.parametrize("owner", [0, 1])
def test_bcast_data_initializes(comm: CommunicatorBase, owner: int) -> None:
    model = Model()
    if comm.rank == owner:
        model.lazy.initialize((3, 2))
        model.lazy.array[...] = 7
    comm.bcast_data(model)
    assert model.lazy.shape == (3, 2)
    assert (model.lazy.array == 7).all()


@pytest.mark.mpi(2)
def test_bcast_data_leaves_persistent_values(comm: CommunicatorBase) -> None:
    layer = L.BatchNormalization(3)
    layer.avg_mean[...] = comm.rank
    comm.bcast_data(layer)
    assert (layer.avg_mean == comm.rank).all()


@pytest.mark.mpi(1, 2, 3)
def test_bcast_data_with_persistent_values(comm: CommunicatorBase) -> None:
    layer = L.BatchNormalization(3)
    for array in (layer.gamma.array, layer.avg_mean, layer.avg_var):
        array[...] = comm.rank + 2
    layer.N = comm.rank + 7
    comm.bcast_data(layer, persistent=True)
    for array in (layer.gamma.array, layer.avg_mean, layer.avg_var):
        np.testing.assert_array_equal(array, np.full(3, 2, "f"), strict=True)
    assert layer.N == 7


@pytest.mark.mpi(2, 3)
def test_persistent_values_on_some_ranks(comm: CommunicatorBase) -> None:
    with pytest.raises(ValueError, match=r"bcast_data: .* rank 0: persistent=True; rank 1: per"):
        comm.bcast_data(Model(), persistent=comm.rank == 0)


@pytest.mark.mpi(2)
def test_dummy_exchanges_nothing() -> None:
    comm = chainermn.create_communicator("dummy")
    model = Model()
    fill(model, comm.rank, "grad")
    before = {key: np.array(grad) for key, grad in values(model, "grad").items()}
    comm.multi_node_mean_grad(model)
    np.testing.assert_array_equal(model.a.grad, before["/a"])


def loss(model: chainer.Chain, x: np.ndarray, t: np.ndarray) -> chainer.Variable:
    return F.mean_squared_error(model(x), t)


def network() -> chainer.Sequential:
    np.random.seed(0)
    with chainer.using_config("dtype", np.float64):
        return chainer.Sequential(L.Linear(3, 8), F.tanh, L.Linear(8, 2))


def data(step: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(step)
    return generator.normal(size=(12, 3)), generator.normal(size=(12, 2))


@pytest.mark.mpi(1, 2, 3, 4)
@pytest.mark.parametrize("name", EXCHANGING)
def test_training_equals_one_process(name: str) -> None:
    comm: CommunicatorBase = chainermn.create_communicator(name)
    alone, shared = network(), network()
    reference = chainer.optimizers.MomentumSGD(0.1).setup(alone)
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(0.1), comm
    ).setup(shared)
    optimizer.update(loss, shared, *data(0))  # only synchronizes
    for step in range(20):
        x, t = data(step)
        reference.update(loss, alone, x, t)
        part = slice(12 * comm.rank // comm.size, 12 * (comm.rank + 1) // comm.size)
        optimizer.update(loss, shared, x[part], t[part])
    for key, array in values(alone, "array").items():
        np.testing.assert_allclose(values(shared, "array")[key], array, rtol=1e-12, atol=1e-14)


@pytest.mark.mpi(1, 2, 3)
def test_debug_mode_names_gradients_that_are_not_finite(comm: CommunicatorBase) -> None:
    model = Model()
    fill(model, 0, "grad")
    if comm.rank == comm.size - 1:
        model.c.grad[1] = np.nan
        model.a.grad[0] = np.inf
    message = (
        r"^Parameters diverged after allreduce\. multi_node_mean_grad: gradients that are NaN or "
        rf"infinite: rank {comm.size - 1}: /a, /c\. Look at .* learning rate.*loss_scaling\(\)$"
    )
    with chainer.using_config("debug", True), pytest.raises(ValueError, match=message):
        comm.multi_node_mean_grad(model)


@pytest.mark.mpi(2, 3)
def test_settings_that_differ(comm: CommunicatorBase) -> None:
    model = Model()
    fill(model, 0, "grad")
    if comm.rank == 1:
        comm.set_config("allreduce_grad_dtype", "float16")
    with pytest.raises(ValueError, match=r"disagree.*rank 1: allreduce_grad_dtype=float16"):
        comm.multi_node_mean_grad(model)
