"""A file that shows what all ranks did, asked for by a variable or by an extension."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import chainer

from chainermn import spans
from chainermn.agreement import run_on_root
from chainermn.gradients.parameters import is_on_gpu
from chainermn.observation.layers import layers_observed
from chainermn.observation.trainers import observe
from chainermn.timeline import trace
from chainermn.timeline.gpu_streams import GpuStreams
from chainermn.timeline.recording import Recording
from chainermn.transport.gpu.device import the_gpu

if TYPE_CHECKING:
    from mpi4py import MPI

#: The file to write; in an environment where it is set, every job records a timeline.
VARIABLE = "CHAINERMN_TIMELINE"
#: If set to 1, also the layers of the model.
LAYERS = "CHAINERMN_TIMELINE_LAYERS"
#: The first and the last iteration to record, as in ``100-120``.
ITERATIONS = "CHAINERMN_TIMELINE_ITERATIONS"

_timeline_of_job: TimelineFile | None = None


class Settings(NamedTuple):
    """What to record, and where to write it."""

    path: str
    with_layers: bool = False
    first: int | None = None
    last: int | None = None

    @classmethod
    def from_environment(cls) -> Settings | None:
        """Return what the environment asks for; None if it asks for nothing.

        Raises ValueError if it is not clear what it asks for.
        """
        path = os.environ.get(VARIABLE)
        if not path:
            return None
        iterations = os.environ.get(ITERATIONS, "")
        found = re.fullmatch(r"(\d+)-(\d+)", iterations)
        if iterations and (not found or int(found[1]) > int(found[2])):
            raise ValueError(
                f"{ITERATIONS} must be the first and the last iteration, as in 100-120, "
                f"got {iterations!r}"
            )
        window = (int(found[1]), int(found[2])) if found else (None, None)
        return cls(path, os.environ.get(LAYERS, "0") not in ("", "0"), *window)


class TimelineFile:
    """Records what the ranks of a communicator do. Making one is collective.

    Raises OSError on every rank if the file cannot be written.
    """

    def __init__(self, mpi_comm: MPI.Intracomm, settings: Settings, where: str) -> None:
        self.settings = settings
        self._comm, self._where = mpi_comm, where
        self._path = Path(settings.path).absolute()
        run_on_root(mpi_comm, 0, where, self._check)
        self._recording = Recording(mpi_comm, settings.first, settings.last)
        self._streams: GpuStreams | None = None

    def _check(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        was_there = self._path.exists()
        self._path.touch()
        if not was_there:  # nor will it be if the job fails
            self._path.unlink()

    def observe(self, trainer: chainer.training.Trainer) -> Callable[[], None]:
        """Record what a trainer does, too; return what ends its last iteration."""
        observation = observe(trainer)
        optimizers: Any = getattr(trainer.updater, "get_all_optimizers", dict)().values()
        if self._streams is None and any(is_on_gpu(one.target) for one in optimizers):
            self._streams = GpuStreams(the_gpu())
            spans.measure_streams(self._streams)
        if self.settings.with_layers:
            observation.within(layers_observed)
        return observation.end

    def write(self) -> None:
        """Record no more, and write the file. Collective."""
        if self._streams is not None:
            spans.measure_streams(None)
            self._streams.finish()
        recorded = self._recording.stop()
        run_on_root(self._comm, 0, self._where, lambda: trace.write(self._path, recorded or []))
        if self._comm.rank == 0:
            print(
                f"timeline of {self._comm.size} ranks: {self._path}. Open it in "
                f"https://ui.perfetto.dev, or sum it up: chainermn report {self._path}",
                flush=True,
            )

    def discard(self) -> None:
        """Record no more."""
        spans.measure_streams(None)
        self._recording.discard()


@contextlib.contextmanager
def record_timeline(
    comm: Any,
    filename: str | os.PathLike[str],
    *,
    layers: bool = False,
    iterations: tuple[int, int] | None = None,
) -> Iterator[None]:
    """Record what every rank does in the ``with`` block, and write it into one file. Collective.

    For a training loop without a trainer: mark each iteration by
    ``with chainermn.spans.span('iteration', details={'iteration': number})``. If the block raises,
    nothing is written.

    Parameters
    ----------
    comm : CommunicatorBase
        Its ranks are recorded.
    filename : path
    layers, iterations
        As for `chainermn.extensions.Timeline`.

    Raises
    ------
    OSError
        On every rank, if the file cannot be written.
    """
    window = iterations or (None, None)
    timeline = TimelineFile(
        comm.mpi_comm, Settings(str(filename), layers, *window), "record_timeline"
    )
    try:
        with layers_observed() if layers else contextlib.nullcontext():
            yield
    except BaseException:
        timeline.discard()
        raise
    timeline.write()


def record_if_asked(mpi_comm: MPI.Intracomm, settings: Settings | None) -> None:
    """Record the whole job if its environment says so. Collective, if this is the first call.

    Parameters
    ----------
    mpi_comm : mpi4py.MPI.Intracomm
    settings : Settings or None
        The same on all ranks.
    """
    global _timeline_of_job
    if settings is None or _timeline_of_job is not None:
        return
    timeline = _timeline_of_job = TimelineFile(mpi_comm, settings, VARIABLE)
    run = chainer.training.Trainer.run

    def recorded_run(trainer: Any, *args: Any, **kwargs: Any) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(timeline.observe(trainer))
            run(trainer, *args, **kwargs)

    chainer.training.Trainer.run = recorded_run
    atexit.register(timeline.write)
