"""Models of which several ranks compute parts at the same time, against one process in float64."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pages
import pytest
from test_pages import EXAMPLES, LIMIT, lines_of_ranks, load

pytestmark = pytest.mark.timeout(4 * LIMIT)
#: Of float64, after some steps.
EXACT = {"rtol": 1e-10, "atol": 1e-12}


@pytest.fixture(autouse=True)
def float64(monkeypatch):
    """Compute in float64, here and in the examples, whose dtype is Chainer's."""
    monkeypatch.setenv("CHAINER_DTYPE", "float64")
    with chainer.using_config("dtype", np.float64):
        yield


def assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], **EXACT, err_msg=name)


def parameters(net: chainer.Link) -> dict[str, np.ndarray]:
    """Return them by the names that they have in files."""
    return {path[1:]: parameter.array for path, parameter in net.namedparams()}


def printed_on(name: str) -> list[str]:
    """Return the lines that a page says its example prints, sorted."""
    blocks = pages.blocks(pages.DOCS / f"model_parallel/{name}.md")
    (text,) = (block.text for block in blocks if block.mark == "prints")
    return sorted(text.splitlines())


# Channels


class OneNet(chainer.Chain):
    """What `channel_parallel.Net` is on all ranks together."""

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


@pytest.mark.parametrize("ranks", [2, 3])
def test_divided_channels_train_as_in_one_process(ranks, tmp_path):
    example = load(EXAMPLES / "channel_parallel.py")
    lines = lines_of_ranks(ranks, EXAMPLES / "channel_parallel.py", tmp_path, cwd=tmp_path)
    if ranks == 2:
        assert lines == printed_on("collectives")
    net = OneNet(example.CHANNELS, example.CLASSES, example.SIZE)
    before = joined(tmp_path, "before", ranks)
    for path, parameter in net.namedparams():
        parameter.array[...] = before[path[1:]]
    optimizer = chainer.optimizers.MomentumSGD(lr=0.02).setup(net)
    x, t = example.make_batch()
    losses = []
    for _ in range(10):
        losses.append(F.softmax_cross_entropy(net(x), t))
        optimizer.update(lambda: losses[-1])
    assert lines[0] == f"loss {losses[0].item():.2f}, after 10 steps {losses[-1].item():.2f}"
    assert_equal(joined(tmp_path, "after", ranks), parameters(net))


# Rows


def one_net() -> chainer.Chain:
    """Return what `spatially_parallel.Net` is on all ranks together."""
    sizes = {"first": (1, 8, 5), "second": (8, 8, 3), "last": (8, 1, 3)}
    layers = {name: L.Convolution2D(*size, pad=size[2] // 2) for name, size in sizes.items()}
    net = chainer.Chain(**layers)
    net.forward = lambda x: net.last(F.relu(net.second(F.relu(net.first(x)))))
    return net


@pytest.mark.parametrize(("ranks", "rows"), [(2, [0, 75, 151]), (3, [0, 50, 100, 151])])
def test_divided_rows_train_as_in_one_process(ranks, rows, tmp_path):
    script = EXAMPLES / "spatially_parallel.py"
    lines = lines_of_ranks(ranks, script, "--out", tmp_path, cwd=tmp_path)
    if ranks == 3:
        assert lines == printed_on("spatial")
    expected = [f"rank {rank}: rows {a} to {b}" for rank, (a, b) in enumerate(pairwise(rows))]
    net = one_net()
    chainer.serializers.load_npz(tmp_path / "before.npz", net)
    optimizer = chainer.optimizers.SGD(lr=0.1).setup(net)
    x, t = load(script).read_rows(range(151), 64)
    losses = [F.mean_squared_error(net(x), t).item()]
    for _ in range(5):
        optimizer.update(lambda: F.mean_squared_error(net(x), t))
        losses.append(F.mean_squared_error(net(x), t).item())
    shown = [f"loss {losses[step]:.3f} after {step} steps" for step in (0, 5)]
    assert lines == sorted([*shown, *expected])
    assert_equal(dict(np.load(tmp_path / "after.npz")), parameters(net))
    parts = [np.load(tmp_path / f"output{rank}.npy") for rank in range(ranks)]
    np.testing.assert_allclose(np.concatenate(parts, axis=2), net(x).array, **EXACT)


def test_fewer_rows_than_the_halo_are_refused():
    example = load(EXAMPLES / "spatially_parallel.py")
    comm = SimpleNamespace(rank=0, size=3)
    assert example.rows_of(comm, 6) == range(2)
    with pytest.raises(ValueError, match=r"5 rows on 3 ranks: .* at least 2"):
        example.rows_of(comm, 5)
