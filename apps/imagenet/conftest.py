"""Shared by the tests: the plugin for tests on several ranks, the app's modules, and images."""

import contextlib
import multiprocessing
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace

import chainer
import matplotlib.font_manager  # noqa: F401  - its very first import writes to standard error
import numpy as np
import pytest

import chainermn
from chainermn.agreement import run_on_root
from chainermn.testing.modules import import_modules

HERE = Path(__file__).resolve().parent
NAMES = [path.stem for path in HERE.glob("*.py") if not path.name.startswith(("test_", "conf"))]

if "chainermn.testing.pytest_plugin" not in sys.modules:  # in a copy of this folder
    pytest_plugins = ["chainermn.testing.pytest_plugin"]


@pytest.fixture(scope="session")
def app() -> SimpleNamespace:
    """Import the app's modules so that another app's may have the same names."""
    return import_modules(HERE, ["models", *NAMES])


@pytest.fixture(scope="module", autouse=True)
def this_process(app) -> Iterator[None]:
    """Let pickle find the app's classes by name, and undo what the scripts set in this process."""
    method = multiprocessing.get_start_method(allow_none=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(HERE)
        for module in vars(app).values():
            patch.setitem(sys.modules, module.__name__, module)
        yield
    multiprocessing.set_start_method(method, force=True)


@pytest.fixture(scope="session")
def run() -> Callable[..., None]:
    """Return a function that calls a script's ``main`` until it has ended on all ranks."""

    def call(main: Callable[[list[str]], object], *options: object) -> None:
        main(list(map(str, options)))
        chainermn.create_communicator().allgather_obj(None)

    return call


@pytest.fixture
def only(monkeypatch) -> Callable[[int], AbstractContextManager[bool]]:
    """Return a context in which scripts see only some ranks; it tells whether this is one."""

    @contextlib.contextmanager
    def context(ranks: int) -> Iterator[bool]:
        comm = chainermn.create_communicator()
        part = comm.split(comm.rank // ranks, comm.rank)
        with monkeypatch.context() as patch:
            patch.setattr(chainermn, "create_communicator", lambda *_: part)
            yield comm.rank < ranks
        comm.allgather_obj(None)

    return context


@pytest.fixture
def fails(capsys) -> Callable[..., str]:
    """Return a function that calls a script's ``main``, and returns the line that it ends with."""

    def call(main: Callable[[list[str]], object], *options: object) -> str:
        comm = chainermn.create_communicator()
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main(list(map(str, options)))
        assert capsys.readouterr().err == ""
        codes = comm.allgather_obj(caught.value.code)
        assert codes[1:] == [1] * (comm.size - 1)
        assert codes[0].startswith("error: ")
        return codes[0]

    return call


class Stopped(Exception):
    """Ends a training in the middle of an epoch."""


@pytest.fixture
def stop(monkeypatch) -> Callable[..., None]:
    """Return a function that calls train.py's ``main``, and stops it after some iterations."""

    def call(iteration: int, main: Callable[[list[str]], object], *options: object) -> None:
        update = chainer.training.StandardUpdater.update

        def update_or_stop(updater: chainer.training.StandardUpdater) -> None:
            update(updater)
            if updater.iteration == iteration:
                raise Stopped

        with monkeypatch.context() as patch:
            patch.setattr(chainer.training.StandardUpdater, "update", update_or_stop)
            with pytest.raises(Stopped):
                main(list(map(str, options)))
        chainermn.create_communicator().allgather_obj(None)

    return call


@pytest.fixture
def on_rank_0(mpi_ranks) -> Callable[[Callable[[], object]], None]:
    """Return a function that has rank 0 of a test make files, while the other ranks wait."""

    def call(make: Callable[[], object]) -> None:
        if mpi_ranks == 1:
            make()
        else:
            run_on_root(chainermn.create_communicator(), 0, "files", make)

    return call


@pytest.fixture
def drawn_fast(monkeypatch):
    """Draw initial weights with a generator that takes less time than the rest of a test."""

    def fill(self: chainer.initializers.Normal, array: np.ndarray) -> None:
        random = np.random.default_rng(array.size)
        # A prime number of values that are repeated, so that no two rows are equal.
        values = self.scale * random.standard_normal(9973, dtype=np.float32)
        array[...] = np.resize(values, array.shape)

    monkeypatch.setattr(chainer.initializers.Normal, "__call__", fill)


@pytest.fixture
def not_drawn(monkeypatch):
    """Leave initial weights as they are in memory, where a test does not look at them."""
    monkeypatch.setattr(chainer.initializers.Normal, "__call__", lambda self, array: None)


@pytest.fixture
def shallow(app, monkeypatch, drawn_fast) -> None:
    """Make ResNet-50 small: one block per stage, images of 32x32 pixels."""
    network, names = app.models.resnet.ResNet50, app.models.torchvision.NAMES
    monkeypatch.setattr(network, "blocks", (1, 1, 1, 1))
    monkeypatch.setattr(network, "insize", 32)
    kept = {own: name for own, name in names["resnet50"].items() if not re.search("/[1-9]/", own)}
    monkeypatch.setitem(names, "resnet50", kept)


@pytest.fixture(scope="session")
def few(app, tmp_path_factory) -> Path:
    """Return a folder with 120 images to train on and 31 to validate with. Only on ranks."""
    comm = chainermn.create_communicator()
    root = comm.bcast_obj(tmp_path_factory.mktemp("data") / "few")
    run_on_root(comm, 0, "images", lambda: app.generated.create(root, 120, 31))
    return root


@pytest.fixture(scope="session")
def lists(few) -> list[str | Path]:
    """Return the options of scripts that name these images, and the small network."""
    options = ["--train", few / "train.txt", "--val", few / "val.txt", "--root", few]
    return [*options, "--arch", "small", "--loaderjob", "0"]
