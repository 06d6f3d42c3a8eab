"""Models whose parts run on several ranks at the same time, against one process in float64."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pages
import pytest
from loading import load
from on_ranks import EXAMPLES, lines_here, mpi

import chainermn

#: Tolerances for float64 after some steps.
EXACT = {"rtol": 1e-10, "atol": 1e-12}


@pytest.fixture(autouse=True)
def float64():
    """Compute in float64, here and in the examples, which use Chainer's dtype."""
    with chainer.using_config("dtype", np.float64):
        yield


def assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], **EXACT, err_msg=name)


def parameters(net: chainer.Link) -> dict[str, np.ndarray]:
    """Return a network's parameters by the names that they have in files."""
    return {path[1:]: parameter.array for path, parameter in net.namedparams()}


def printed_on(name: str) -> list[str]:
    """Return the lines that a page says its example prints, sorted."""
    blocks = pages.blocks(pages.DOCS / f"model_parallel/{name}.md")
    (text,) = (block.text for block in blocks if block.mark == "prints")
    return sorted(text.splitlines())


# Channels


class OneNet(chainer.Chain):
    """The network that `channel_parallel.Net` forms on all ranks together."""

    def __init__(self, channels: int, classes: int, size: int) -> None:
        super().__init__()
        with self.init_scope():
            self.first = L.Convolution2D(1, 4, 3, pad=1)
            self.second = L.Convolution2D(4, channels, 3, pad=1)
            self.third = L.Convolution2D(channels, channels, 3, pad=1)
            self.last = L.Linear(channels * size**2, classes)

    def forward(self, x):
        for layer in (self.first, self.second, self.third):
            x = F.relu(layer(x))
        return self.last(x)


def joined(folder: Path, when: str, ranks: int) -> dict[str, np.ndarray]:
    """Return the parameters of all ranks together."""
    parts = [np.load(folder / f"{when}{rank}.npz") for rank in range(ranks)]
    whole = {}
    for name in parts[0]:
        shares = [part[name] for part in parts if name in part]
        if name.startswith("first/"):
            assert all(np.array_equal(share, shares[0]) for share in shares)
            whole[name] = shares[0]
        else:
            whole[name] = np.concatenate(shares, axis=int(name == "last/W"))
    return whole


@mpi(2, 3)
def test_divided_channels_train_as_in_one_process(mpi_ranks, shared_tmp_path):
    example = load(EXAMPLES / "channel_parallel.py")
    lines = lines_here(EXAMPLES / "channel_parallel.py", shared_tmp_path)
    if mpi_ranks == 2:
        assert lines == printed_on("collectives")
    net = OneNet(example.CHANNELS, example.CLASSES, example.SIZE)
    before = joined(shared_tmp_path, "before", mpi_ranks)
    for path, parameter in net.namedparams():
        parameter.array[...] = before[path[1:]]
    optimizer = chainer.optimizers.MomentumSGD(lr=0.02).setup(net)
    x, t = example.make_batch()
    losses = []
    for _ in range(10):
        losses.append(F.softmax_cross_entropy(net(x), t))
        optimizer.update(lambda: losses[-1])
    assert lines[0] == f"loss {losses[0].item():.2f}, after 10 steps {losses[-1].item():.2f}"
    assert_equal(joined(shared_tmp_path, "after", mpi_ranks), parameters(net))


# Rows


def one_net() -> chainer.Chain:
    """Return the network that `spatially_parallel.Net` forms on all ranks together."""
    sizes = {"first": (1, 8, 5), "second": (8, 8, 3), "last": (8, 1, 3)}
    layers = {name: L.Convolution2D(*size, pad=size[2] // 2) for name, size in sizes.items()}
    net = chainer.Chain(**layers)
    net.forward = lambda x: net.last(F.relu(net.second(F.relu(net.first(x)))))
    return net


@mpi(2, 3)
def test_divided_rows_train_as_in_one_process(mpi_ranks, shared_tmp_path):
    script = EXAMPLES / "spatially_parallel.py"
    lines = lines_here(script, "--out", shared_tmp_path)
    if mpi_ranks == 3:
        assert lines == printed_on("spatial")
    rows = {2: [0, 75, 151], 3: [0, 50, 100, 151]}[mpi_ranks]
    expected = [f"rank {rank}: rows {a} to {b}" for rank, (a, b) in enumerate(pairwise(rows))]
    net = one_net()
    chainer.serializers.load_npz(shared_tmp_path / "before.npz", net)
    optimizer = chainer.optimizers.SGD(lr=0.1).setup(net)
    x, t = load(script).read_rows(range(151), 64)
    losses = [F.mean_squared_error(net(x), t).item()]
    for _ in range(5):
        optimizer.update(lambda: F.mean_squared_error(net(x), t))
        losses.append(F.mean_squared_error(net(x), t).item())
    shown = [f"loss {losses[step]:.3f} after {step} steps" for step in (0, 5)]
    assert lines == sorted([*shown, *expected])
    assert_equal(dict(np.load(shared_tmp_path / "after.npz")), parameters(net))
    parts = [np.load(shared_tmp_path / f"output{rank}.npy") for rank in range(mpi_ranks)]
    np.testing.assert_allclose(np.concatenate(parts, axis=2), net(x).array, **EXACT)


def test_fewer_rows_than_the_halo_are_refused():
    example = load(EXAMPLES / "spatially_parallel.py")
    comm = SimpleNamespace(rank=0, size=3)
    assert example.rows_of(comm, 6) == range(2)
    with pytest.raises(ValueError, match=r"5 rows on 3 ranks: .* at least 2"):
        example.rows_of(comm, 5)


# A pipeline


@mpi(2, 4)
def test_pipeline_trains_as_one_process(mpi_ranks, shared_tmp_path):
    script, channels = EXAMPLES / "pipeline.py", 4
    micro_batches, batchsize, more = {
        2: (4, 6, []),  # of 1, 2, 1 and 2 examples
        4: (3, 4, ["--recompute"]),
    }[mpi_ranks]
    options = {"micro-batches": micro_batches, "batchsize": batchsize, "channels": channels}
    arguments = [f"--{name}={value}" for name, value in options.items()]
    lines = lines_here(script, *arguments, *more, "--out", shared_tmp_path)
    example = load(script)

    def stages(when: str) -> chainer.ChainList:
        """Return the stages of all ranks, one after the other."""
        net = chainer.ChainList()
        for rank in range(mpi_ranks):
            part = chainer.ChainList(example.make_stage(rank, mpi_ranks, channels))
            chainer.serializers.load_npz(shared_tmp_path / f"{when}{rank}.npz", part)
            net.append(part[0])
        return net

    net = stages("before")
    optimizer = chainer.optimizers.MomentumSGD(lr=0.02).setup(net)
    x, t = example.make_batch(batchsize)
    expected = []
    for step in range(5):
        loss = F.softmax_cross_entropy(chainer.Sequential(*net)(x), t)
        net.cleargrads()
        loss.backward()
        optimizer.update()
        expected.append(f"loss {loss.item():.3f} in step {step}")
    assert lines == sorted(expected)
    assert_equal(parameters(stages("after")), parameters(net))


def test_layers_are_recomputed_in_backward():
    calls = []

    def double(h):
        calls.append(h.shape)
        return 2 * h

    y = load(EXAMPLES / "pipeline.py").Recomputed(double, double)(np.ones((1, 3)))
    assert len(calls) == 2
    F.sum(y).backward()
    assert len(calls) == 4


@pytest.mark.each_mpi
@mpi(3)
def test_pipeline_with_messages_of_more_than_a_megabyte():
    """Such messages wait for the receiver, because no MPI buffers so much."""
    example, comm = load(EXAMPLES / "pipeline.py"), chainermn.create_communicator()
    stages = [L.Scale(W_shape=(200_000,)) for _ in range(3)]
    for rank, stage in enumerate(stages):
        stage.W.array *= rank + 1  # every rank scales by its own weights
        stage.cleargrads()
    x = np.random.RandomState(0).normal(size=(4, 200_000))
    t = np.arange(4, dtype=np.int32)
    model = example.make_model(comm, stages[comm.rank].copy("copy"))
    example.backprop(model, x, t, micro_batches=4)
    F.softmax_cross_entropy(chainer.Sequential(*stages)(x), t).backward()
    np.testing.assert_allclose(model[0].W.grad, stages[comm.rank].W.grad, **EXACT)


@pytest.fixture
def chart(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    return load(EXAMPLES / "pipeline_chart.py")


@mpi(3)
def test_micro_batches_go_down_the_ranks_and_back(mpi_ranks, shared_tmp_path):
    """Check the order in which ranks compute, not how long it takes."""
    micro_batches = 4
    lines = lines_here(
        *(EXAMPLES / "pipeline_chart.py", "--micro-batches", f"{micro_batches}"),
        *("--batchsize=4", "--channels=4", "--steps=1", "--out", shared_tmp_path),
    )
    assert len(lines) == 1
    assert (shared_tmp_path / "pipeline.png").stat().st_size > 1000
    spans = json.loads((shared_tmp_path / "pipeline.json").read_text())[f"{micro_batches}"]
    assert len(spans) == mpi_ranks
    numbers = [*range(micro_batches)]
    for of_rank in spans:
        order = [("forward", i) for i in numbers] + [("backward", i) for i in numbers[::-1]]
        assert [(direction, i) for direction, i, *_ in of_rank] == order
        times = [time for *_, begin, end in of_rank for time in (begin, end)]
        assert times == sorted(times)
    times = [{(direction, i): span for direction, i, *span in of_rank} for of_rank in spans]
    for earlier, later in pairwise(times):
        for i in numbers:
            assert earlier["forward", i][1] <= later["forward", i][0]
            assert later["backward", i][1] <= earlier["backward", i][0]


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 1), (2, 8), (4, 3)])
def test_idle_share_of_a_perfect_pipeline_is_that_of_theory(chart, ranks, micro_batches):
    """Here forward takes 1 s, and backward 2 s."""
    last = micro_batches + ranks - 1
    spans = [
        [("forward", i, 5.0 + rank + i, 6.0 + rank + i) for i in range(micro_batches)]
        + [
            ("backward", i, end - 2.0, float(end))
            for i in range(micro_batches)
            for end in [5 + last + 2 * (last - rank - i)]
        ]
        for rank in range(ranks)
    ]
    assert chart.duration(spans) == 3 * last
    expected = chart.idle_share_in_theory(ranks, micro_batches)
    assert chart.idle_share(spans) == pytest.approx(expected) == (ranks - 1) / last
