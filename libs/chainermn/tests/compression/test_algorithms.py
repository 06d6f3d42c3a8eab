"""The compression algorithms, against plain versions that compute all ranks at once."""

from __future__ import annotations

from typing import Any

import chainer
import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import chainermn
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.compression import Compression, PowerSGD, Quantization, TopK, power_sgd, top_k
from chainermn.gradients.compressor import Compressor

SHAPES = {"a": (40, 30), "b": (24, 3, 3, 5), "c": (64, 17)}
STEPS = 6

EVERY = [
    PowerSGD(rank=1),
    PowerSGD(rank=3, min_ratio=1),
    TopK(density=0.1, min_size=100),
    TopK(density=0.02, momentum=0.9, min_size=100, warmup_iterations=4),
    Quantization(min_size=100, block=32),
    Quantization(bits=16, min_size=100),
]


def model_of(dtype: Any = np.float64, **shapes: tuple[int, ...]) -> chainer.Link:
    link = chainer.Link()
    with link.init_scope():
        for name, shape in (shapes or SHAPES).items():
            setattr(link, name, chainer.Parameter(np.zeros(shape, dtype)))
    return link


def gradient(name: str, rank: int, step: int) -> np.ndarray:
    random = np.random.default_rng([ord(name), rank, step])
    shape = SHAPES[name]
    # The rows differ in magnitude, which gives the gradient some structure.
    return random.normal(size=shape) * np.exp(
        random.normal(size=(shape[0],) + (1,) * (len(shape) - 1))
    )


def gradients(comm: CommunicatorBase, name: str, step: int) -> list[np.ndarray]:
    return [gradient(name, rank, step) for rank in range(comm.size)]


def average(
    comm: CommunicatorBase, model: chainer.Link, compressor: Compressor, step: int
) -> dict[str, np.ndarray]:
    for name, parameter in model.namedparams():
        parameter.grad = gradient(name[1:], comm.rank, step).astype(parameter.dtype)
    comm.gradients.mean(model, True, compressor=compressor)
    return {name[1:]: parameter.grad.copy() for name, parameter in model.namedparams()}


def unsent(compressor: Compressor, name: str) -> np.ndarray:
    """Return the part of a parameter's gradients that this rank has not sent yet."""
    state, kind = compressor.state()[f"/{name}"], type(compressor.compression)
    if "left" in state:
        return state["total"] - (state["left"] @ state["own"]).reshape(-1)
    return state[{PowerSGD: "total", TopK: "unsent", Quantization: "error"}[kind]]


def make(compression: Compression, **kwds: Any) -> tuple[CommunicatorBase, Any, Compressor]:
    comm = chainermn.create_communicator("naive")
    return comm, model_of(**kwds), Compressor(compression)


@pytest.fixture(params=["subtracted at once", "subtracted later"])
def when_subtracted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have PowerSGD subtract what it sent right away, or only in the next step."""
    if request.param == "subtracted later":
        monkeypatch.setattr(power_sgd, "SUBTRACTED_BYTES", 0)


@pytest.mark.mpi(1, 2, 3)
@pytest.mark.usefixtures("when_subtracted")
@pytest.mark.parametrize("rank", [1, 2, 5])
def test_power_sgd(rank: int) -> None:
    comm, _, compressor = make(PowerSGD(rank=rank, min_ratio=1))
    for name, shape in SHAPES.items():
        n, m = shape[0], int(np.prod(shape[1:]))
        errors = [np.zeros((n, m)) for _ in range(comm.size)]
        right = power_sgd.random_matrix(f"/{name}", (min(rank, n, m), m)).T
        fresh = model_of(**{name: shape})
        compressor = Compressor(compressor.compression)
        for step in range(STEPS):
            given = gradients(comm, name, step)
            inputs = [e + g.reshape(n, m) for e, g in zip(errors, given, strict=True)]
            mean = np.mean(inputs, axis=0)
            left, _ = np.linalg.qr(mean @ right)
            right = mean.T @ left
            errors = [each - left @ (left.T @ each) for each in inputs]
            got = average(comm, fresh, compressor, step)[name]
            np.testing.assert_allclose(got.reshape(n, m), left @ right.T, rtol=1e-7, atol=1e-9)
            own = unsent(compressor, name)
            np.testing.assert_allclose(own.reshape(n, m), errors[comm.rank], rtol=1e-7, atol=1e-9)


@pytest.mark.mpi(2)
def test_when_it_is_subtracted_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for limits in ([1 << 30], [0], [0, 0, 1 << 30, 1 << 30], [5000, 0]):
        comm, model, compressor = make(PowerSGD(rank=2), dtype=np.float32)
        means = []
        for step in range(STEPS):
            monkeypatch.setattr(power_sgd, "SUBTRACTED_BYTES", limits[step % len(limits)])
            # The loss scale changes, too.
            for parameter in model.params():
                parameter._loss_scale = 2.0 ** (step // 3)
            means.append(average(comm, model, compressor, step))
        results.append(means)
    for means in results[1:]:
        for one, other in zip(means, results[0], strict=True):
            for name in SHAPES:
                np.testing.assert_array_equal(one[name], other[name])


@pytest.mark.mpi(1, 2)
@pytest.mark.parametrize("compression", EVERY, ids=repr)
def test_gradients_that_are_not_finite_are_forgotten(compression: Compression) -> None:
    comm, model, compressor = make(compression)
    for step in range(3):
        average(comm, model, compressor, step)
    model.cleargrads()
    for parameter in model.params():
        parameter.grad = np.full(parameter.shape, np.nan if comm.rank == 0 else 1.0)
    comm.gradients.mean(model, True, compressor=compressor)
    for mean in average(comm, model, compressor, 4).values():
        assert np.isfinite(mean).all()
        assert mean.any()


@pytest.mark.mpi(1, 2)
@pytest.mark.parametrize("compression", EVERY, ids=repr)
def test_of_an_exchange_that_fails_halfway_nothing_is_saved(
    compression: Compression, monkeypatch: pytest.MonkeyPatch
) -> None:
    comm, model, compressor = make(compression)
    for step in range(3):
        average(comm, model, compressor, step)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(Compressor, "commit", lambda *_: 1 // 0)
        average(comm, model, compressor, 3)
    assert not compressor.state()
    first = average(*make(compression), 4)
    again = average(comm, model, compressor, 4)
    if not getattr(compression, "warmup_iterations", 0):  # the warm-up does not start over
        for name in SHAPES:
            np.testing.assert_array_equal(again[name], first[name])


@pytest.mark.mpi(1, 2, 3)
@pytest.mark.parametrize("momentum", [0.0, 0.7])
def test_top_k(momentum: float) -> None:
    density = 0.05
    comm, model, compressor = make(TopK(density=density, momentum=momentum, min_size=1))
    unsent = {name: [np.zeros(shape) for _ in range(comm.size)] for name, shape in SHAPES.items()}
    velocity = {
        name: [np.zeros(shape) for _ in range(comm.size)] for name, shape in SHAPES.items()
    }
    for step in range(STEPS):
        got = average(comm, model, compressor, step)
        for name, shape in SHAPES.items():
            mean = np.zeros(shape)
            for rank, given in enumerate(gradients(comm, name, step)):
                velocity[name][rank] = momentum * velocity[name][rank] + given
                unsent[name][rank] += velocity[name][rank]
                flat = unsent[name][rank].ravel()
                sent = np.argsort(-abs(flat))[: round(density * flat.size)]
                mean.ravel()[sent] += flat[sent] / comm.size
                flat[sent] = 0
                velocity[name][rank].ravel()[sent] = 0
            np.testing.assert_allclose(got[name], mean, rtol=1e-12)
            own = compressor.state()[f"/{name}"]["unsent"]
            np.testing.assert_allclose(own, unsent[name][comm.rank].ravel(), rtol=1e-12)


@pytest.mark.mpi(1, 2, 3)
@pytest.mark.parametrize("bits", [8, 16])
def test_quantization(bits: int) -> None:
    block, limit = 16, 2 ** (bits - 1) - 1
    comm, model, compressor = make(Quantization(bits=bits, block=block, min_size=1))
    errors = {name: [np.zeros(shape) for _ in range(comm.size)] for name, shape in SHAPES.items()}

    def rounded(values: np.ndarray) -> np.ndarray:
        result = np.zeros_like(values)
        for start in range(0, values.size, block):
            part = values.ravel()[start : start + block]
            scale = np.float32(np.float32(abs(part).max()) / np.float32(limit))
            result.ravel()[start : start + block] = np.rint(part / scale) * scale
        return result

    for step in range(STEPS):
        got = average(comm, model, compressor, step)
        for name, shape in SHAPES.items():
            given = gradients(comm, name, step)
            inputs = [e + g for e, g in zip(errors[name], given, strict=True)]
            sent = [rounded(each) for each in inputs]
            total = np.mean(sent, axis=0)
            mean = rounded(total)
            np.testing.assert_allclose(got[name], mean, rtol=1e-6, atol=1e-9)
            errors[name] = [each - part for each, part in zip(inputs, sent, strict=True)]
            n_blocks = -(-total.size // (block * comm.size))
            for rank in range(comm.size):
                shard = slice(rank * n_blocks * block, (rank + 1) * n_blocks * block)
                errors[name][rank].ravel()[shard] += comm.size * (total - mean).ravel()[shard]
            own = compressor.state()[f"/{name}"]["error"].reshape(shape)
            np.testing.assert_allclose(own, errors[name][comm.rank], rtol=1e-6, atol=1e-6)


@pytest.mark.mpi(1, 2, 3)
@pytest.mark.usefixtures("when_subtracted")
@pytest.mark.parametrize(
    "compression", [c for c in EVERY if not getattr(c, "momentum", 0)], ids=repr
)
def test_nothing_is_lost(compression: Compression) -> None:
    """The applied and the unsent parts add up to all the gradients."""
    comm, model, compressor = make(compression)
    applied = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(STEPS):
        for name, mean in average(comm, model, compressor, step).items():
            applied[name] += mean
    for name, shape in SHAPES.items():
        own = unsent(compressor, name).reshape(shape)
        left_out = np.mean(comm.allgather_obj(own), axis=0)
        expected = sum(
            gradient(name, rank, step) for rank in range(comm.size) for step in range(STEPS)
        )
        np.testing.assert_allclose(applied[name] + left_out, expected / comm.size, atol=1e-6)
        assert abs(left_out).max() > 0


@pytest.mark.mpi(2, 3)
@pytest.mark.parametrize("compression", EVERY, ids=repr)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_the_means_are_the_same_bits_on_all_ranks(compression: Compression, dtype: Any) -> None:
    comm, model, compressor = make(compression, dtype=dtype)
    for step in range(STEPS):
        for mean in average(comm, model, compressor, step).values():
            assert mean.dtype == dtype
            assert mean.any()
            assert len(set(comm.allgather_obj(mean.tobytes()))) == 1


@pytest.mark.mpi(2)
@pytest.mark.parametrize("compression", EVERY, ids=repr)
def test_fewer_bytes(compression: Compression, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank hands MPI and the all-reduce far fewer bytes than its gradients have."""
    from chainermn.transport.collectives import Collectives

    given: list[int] = []
    for name in ("mean", "allgather", "alltoall"):
        method = getattr(Collectives, name)

        def counting(self: Any, buffer: Any, method: Any = method) -> Any:
            given.append(buffer.nbytes)
            return method(self, buffer)

        monkeypatch.setattr(Collectives, name, counting)
    comm, _, compressor = make(compression)
    model = model_of(np.float32, a=(256, 256))
    model.a.grad = np.random.default_rng(comm.rank).normal(size=(256, 256)).astype(np.float32)
    for _ in range(5):  # only the last iteration, past any warm-up, is counted
        given.clear()
        comm.gradients.mean(model, True, compressor=compressor)
    ratio = model.a.grad.nbytes / sum(given)
    expected = {
        PowerSGD: 256 / 2 / getattr(compression, "rank", 1),
        TopK: None,
        Quantization: None,
    }
    if isinstance(compression, TopK):
        assert ratio == pytest.approx(1 / (2 * compression.density), rel=0.01)
    elif isinstance(compression, Quantization):
        # All shards in an all-to-all, then one of the two in an all-gather.
        assert ratio == pytest.approx(32 / compression.bits / 1.5, rel=0.13)
    else:
        assert ratio == expected[PowerSGD]


@pytest.mark.mpi(1, 2)
def test_gradients_of_low_rank_are_exact() -> None:
    """Dependent columns must not turn rounding errors, or zeros, into directions."""
    comm, model, compressor = make(PowerSGD(rank=4, min_ratio=1))
    random = np.random.default_rng(0)
    u, v = random.normal(size=(40, 2)), random.normal(size=(2, 30))
    for step in range(8):
        model.cleargrads()
        model.a.grad = u @ v if step >= 2 else np.zeros((40, 30))
        comm.gradients.mean(model, True, compressor=compressor)
        np.testing.assert_allclose(model.a.grad, u @ v if step >= 2 else 0, atol=1e-9)
        assert abs(unsent(compressor, "a")).max() < 1e-9
        right = compressor.state()["/a"]["right"]
        np.testing.assert_allclose(np.linalg.norm(right, axis=1), 1)


@pytest.mark.parametrize("size", [1, 5, 1000, 20_000])
@hypothesis.given(seed=st.integers(0, 10**6), density=st.floats(0.001, 1), kind=st.integers(0, 4))
def test_find_largest(size: int, seed: int, density: float, kind: int) -> None:
    random = np.random.default_rng(seed)
    array = random.normal(size=size)
    array = [
        array,
        np.maximum(array - 1.5, 0),
        np.zeros(size),
        np.rint(array),
        np.where(random.random(size) < 0.1, np.nan, array),
    ][kind]
    count = max(1, int(size * density))
    found = top_k.find_largest(array, count)
    assert len(set(found.tolist())) == count
    np.testing.assert_array_equal(np.sort(abs(array[found])), np.sort(abs(array))[size - count :])


@pytest.mark.parametrize("compression", EVERY, ids=repr)
def test_says_all_in_its_repr(compression: Compression) -> None:
    names = {"PowerSGD": PowerSGD, "TopK": TopK, "Quantization": Quantization}
    assert eval(repr(compression), names) == compression


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (PowerSGD, {"rank": 0}, "PowerSGD: rank must be an integer of at least 1, got 0"),
        (PowerSGD, {"rank": 1.5}, "rank must be an integer of at least 1, got 1.5"),
        (PowerSGD, {"rank": True}, "got True"),
        (PowerSGD, {"min_ratio": 0.5}, "min_ratio must be a number of at least 1"),
        (PowerSGD, {"start_iteration": -1}, "start_iteration must be an integer of at least 0"),
        (TopK, {"density": 0}, "density must be a number from 1e-06 to 0.25, got 0"),
        (TopK, {"density": float("nan")}, "density must be a number"),
        (TopK, {"momentum": 1.5}, "TopK: momentum must be a number from 0 to 1, got 1.5"),
        (TopK, {"warmup_iterations": -1}, "warmup_iterations must be"),
        (TopK, {"min_size": 0}, "min_size must be"),
        (Quantization, {"bits": 4}, "Quantization: bits must be 8 or 16, got 4"),
        (Quantization, {"block": 1}, "block must be an integer of at least 8"),
    ],
)
def test_wrong_settings(kind: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**arguments)
