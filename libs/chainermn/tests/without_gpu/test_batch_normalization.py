"""Batch normalization over ranks in GPU memory: what it costs, and how it fails."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import chainer
import chainer.functions as F
import numpy as np
import pytest
from mpi4py import MPI

import chainermn
from chainermn.communicators import registered
from chainermn.functions import multi_node_batch_normalization
from chainermn.testing.mpiexec import run_job

WORLD = MPI.COMM_WORLD
PER_ITERATION = 3  # sums, sums of squares, sums of gradients


class CountedMpi(MPI.Intracomm):
    """A communicator that counts calls by name."""

    counts: ClassVar[Counter[str]] = Counter()

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if callable(found) and not name.startswith("_"):
            CountedMpi.counts[name] += 1
        return found


@pytest.fixture(params=["pure_nccl", "naive"])
def comm(request: pytest.FixtureRequest, stand_in: Any) -> Any:
    comm = registered()[request.param](CountedMpi(WORLD))
    yield comm
    comm.finalize()


def layer_of(stand_in: Any, comm: Any, channels: int, **settings: Any) -> chainer.Link:
    layer = chainermn.links.MultiNodeBatchNormalization(channels, comm, **settings)
    for parameter in layer.params():
        parameter.array = stand_in.to_gpu(parameter.array)
    for name in ("avg_mean", "avg_var"):
        setattr(layer, name, stand_in.to_gpu(getattr(layer, name)))
    return layer


def batch(stand_in: Any, shape: tuple[int, ...], dtype: str = "f4") -> chainer.Variable:
    values = np.random.default_rng(WORLD.rank).normal(size=shape)
    return chainer.Variable(stand_in.to_gpu(values.astype(dtype)))


def iterate(layer: chainer.Link, x: chainer.Variable) -> None:
    F.sum(layer(x)).backward()
    assert isinstance(x.grad, type(x.array))


@pytest.mark.mpi(1, 2)
@pytest.mark.parametrize("dtype", ["f2", "f4"])
def test_no_agreement_and_no_look_after_the_first_call(
    stand_in: Any, comm: Any, dtype: str
) -> None:
    layers = [layer_of(stand_in, comm, channels) for channels in (3, 3, 5)]
    for layer in layers:
        iterate(layer, batch(stand_in, (4, layer.gamma.size, 2), dtype))
    looks = type(layer.gamma.array).looks
    CountedMpi.counts.clear()
    stand_in.log.clear()
    for _ in range(2):
        for layer in layers:
            iterate(layer, batch(stand_in, (4, layer.gamma.size, 2), dtype))
    assert type(layer.gamma.array).looks == looks
    sums = 2 * len(layers) * PER_ITERATION
    if comm.uses_nccl:
        assert Counter(stand_in.log) == {"allReduce": sums}
        assert not CountedMpi.counts
    else:
        assert Counter(stand_in.log) == {"copy_to_host": sums, "copy_to_gpu": sums}
        assert CountedMpi.counts.total() == sums


@pytest.mark.mpi(2)
def test_in_host_memory_they_agree_once_per_call() -> None:
    comm = registered()["naive"](CountedMpi(WORLD))
    layer = chainermn.links.MultiNodeBatchNormalization(3, comm)
    for _ in range(2):
        CountedMpi.counts.clear()
        iterate(layer, chainer.Variable(np.ones((4, 3), "f")))
        assert CountedMpi.counts.total() == 1 + PER_ITERATION
    comm.finalize()


@pytest.mark.mpi(2)
def test_small_batches_are_looked_at_by_their_ranks_only(stand_in: Any, comm: Any) -> None:
    layer = layer_of(stand_in, comm, 3)
    for sizes, looking in ([(4, 1), [1]], [(0, 2), [0]], [(1, 1), [0, 1]]):
        looks = type(layer.gamma.array).looks
        iterate(layer, batch(stand_in, (sizes[comm.rank], 3)))
        assert type(layer.gamma.array).looks - looks == (comm.rank in looking)
    with pytest.warns(UserWarning, match="one sample on all ranks"):
        iterate(layer, batch(stand_in, (comm.rank, 3)))
    with pytest.raises(ValueError, match="the batch is empty on every rank"):
        layer(batch(stand_in, (0, 3)))


@pytest.mark.mpi(2)
def test_wrong_input_raises_on_all_ranks_at_first_and_then_on_its_own(
    stand_in: Any, comm: Any
) -> None:
    layer = layer_of(stand_in, comm, 3)
    good, bad = batch(stand_in, (4, 3)), batch(stand_in, (4, 2))
    message = r"rank 1: expected gamma and beta of shape \(2,\)"
    with pytest.raises(ValueError, match=message):
        layer(bad if comm.rank == 1 else good)
    layer(good)
    CountedMpi.counts.clear()
    if comm.rank == 1:
        with pytest.raises(ValueError, match=message):
            layer(bad)
        assert not CountedMpi.counts
    layer(good)


JOB = """
import sys
sys.path.insert(0, {folder!r})
import numpy as np
import stand_in_gpu, chainermn
from chainermn.communicators.pure_nccl_communicator import PureNcclCommunicator
from chainermn.transport.gpu import device

stand_in = stand_in_gpu.StandInGpu()
device.use(stand_in)
comm = PureNcclCommunicator(chainermn.create_communicator("naive").mpi_comm)
gamma, beta, good, bad = map(stand_in.to_gpu, (np.ones(3), np.ones(3), np.ones((2, 3)), 7))
for x in (good, bad if comm.rank == 1 else good):
    chainermn.functions.multi_node_batch_normalization(x, gamma, beta, comm)
"""


def test_wrong_input_of_one_rank_ends_the_job(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(JOB.format(folder=str(Path(__file__).parent)))
    result = run_job(2, [script])
    assert not result.timed_out
    assert result.returncode != 0
    assert "multi_node_batch_normalization: rank 1: expected x of a float dtype" in result.stderr
    assert "chainermn: rank 1 of 2 on " in result.stderr


@pytest.mark.mpi(2)
def test_layers_that_differ_raise_on_all_ranks(stand_in: Any, comm: Any) -> None:
    layer = layer_of(stand_in, comm, 3 + comm.rank)
    with pytest.raises(ValueError, match=r"rank 1: an array float32\[4\] in GPU memory"):
        layer(batch(stand_in, (4, 3 + comm.rank)))
    layer = layer_of(stand_in, comm, 3, dtype=("f4", "f8")[comm.rank])
    with pytest.raises(ValueError, match=r"rank 1: an array float64\[3\] in GPU memory"):
        layer(batch(stand_in, (4, 3)))


@pytest.mark.mpi(2)
def test_wider_input_of_one_rank_does_not_change_what_travels(stand_in: Any, comm: Any) -> None:
    layer = layer_of(stand_in, comm, 3)
    whole = np.random.default_rng(0).normal(size=(8, 3))
    expected = F.batch_normalization(whole, np.ones(3), np.zeros(3)).array
    for _ in range(2):
        own = whole[4 * comm.rank :][:4].astype(("f4", "f8")[comm.rank])
        y = layer(stand_in.to_gpu(own))
        assert y.dtype == own.dtype
        np.testing.assert_allclose(y.array, expected[4 * comm.rank :][:4], atol=1e-6)


@pytest.mark.mpi(2)
def test_same_values_as_in_host_memory(stand_in: Any, comm: Any) -> None:
    results = []
    for convert in (np.array, stand_in.to_gpu):
        x = chainer.Variable(convert(batch(stand_in, (2 + comm.rank, 3)).array))
        gamma, beta, mean, var = (convert(np.full(3, n, "f")) for n in (2, 1, 0, 1))
        gamma = chainer.Variable(gamma)
        y = multi_node_batch_normalization(
            x, gamma, beta, comm, running_mean=mean, running_var=var
        )
        F.sum(F.exp(y)).backward()
        results.append([np.asarray(v) for v in (y.array, x.grad, gamma.grad, mean, var)])
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)
