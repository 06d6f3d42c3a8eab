"""Write a timeline of all ranks into a file, if a variable or the script asks for it."""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import chainer

from chainermn import failures, spans
from chainermn.agreement import run_on_root
from chainermn.gradients.parameters import is_on_gpu
from chainermn.profiling.layers import layer_spans
from chainermn.profiling.timeline import trace
from chainermn.profiling.timeline.gpu_streams import GpuStreams
from chainermn.profiling.timeline.recording import Recording
from chainermn.profiling.trainers import instrument
from chainermn.transport.gpu.device import the_gpu
from chainermn.transport.host.mpi import load_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

#: File to write. If this variable is set, every job records a timeline.
VARIABLE = "CHAINERMN_TIMELINE"
#: If this is 1, timelines include the layers of the model.
LAYERS = "CHAINERMN_TIMELINE_LAYERS"
#: The first and the last iteration to record, as in ``100-120``.
ITERATIONS = "CHAINERMN_TIMELINE_ITERATIONS"

_timeline_of_job: TimelineFile | None = None
_until_the_end = contextlib.ExitStack()


@dataclass(frozen=True)
class Settings:
    """What to record, and where to write it.

    Raises ValueError if the window is not valid.
    """

    path: str
    with_layers: bool = False
    window: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.window is not None and not 1 <= self.window[0] <= self.window[1]:
            raise ValueError(
                "iterations must be the first and the last iteration to record, counted from 1, "
                f"got {self.window}"
            )

    @classmethod
    def from_environment(cls) -> Settings | None:
        """Return the settings from the environment; None if it does not ask for a timeline.

        Raises ValueError if its variables are not valid.
        """
        path = os.environ.get(VARIABLE)
        if not path:
            return None
        iterations = os.environ.get(ITERATIONS, "")
        found = re.fullmatch(r"(\d+)-(\d+)", iterations)
        if iterations and not (found and 1 <= int(found[1]) <= int(found[2])):
            raise ValueError(
                f"{ITERATIONS} must be the first and the last iteration to record, as in 100-120, "
                f"got {iterations!r}"
            )
        window = (int(found[1]), int(found[2])) if found else None
        return cls(path, os.environ.get(LAYERS, "0") not in ("", "0"), window)


class TimelineFile:
    """Records what the ranks of a communicator do. Creating one is collective.

    Raises OSError on every rank if the file cannot be written.
    """

    def __init__(self, mpi_comm: MPI.Intracomm, settings: Settings, where: str) -> None:
        self.settings = settings
        self._comm, self._where = mpi_comm, where
        self._path = Path(settings.path).absolute()
        self._streams: GpuStreams | None = None
        self._recording = Recording(mpi_comm, settings.window)
        try:
            run_on_root(mpi_comm, 0, where, self._check)
        except BaseException:
            self.discard()
            raise

    def _check(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        was_there = self._path.exists()
        self._path.open("ab").close()
        if not was_there:  # if the job fails, there should be no file
            self._path.unlink()

    def add(self, trainer: chainer.training.Trainer) -> None:
        """Also record what a trainer does, and the streams of its GPU."""
        trainer_spans = instrument(trainer)
        if self.settings.with_layers:
            trainer_spans.within(layer_spans)
        optimizers: Any = getattr(trainer.updater, "get_all_optimizers", dict)().values()
        is_first = self._streams is None and not spans.are_streams_measured()
        if is_first and any(is_on_gpu(optimizer.target) for optimizer in optimizers):
            self._streams = GpuStreams(the_gpu())
            spans.measure_streams(self._streams)

    @contextlib.contextmanager
    def recording_trainers(self) -> Iterator[None]:
        """Record every trainer that runs in the ``with`` block."""
        run = chainer.training.Trainer.run

        def recorded_run(trainer: Any, *args: Any, **kwargs: Any) -> None:
            self.add(trainer)
            run(trainer, *args, **kwargs)

        chainer.training.Trainer.run = recorded_run
        try:
            yield
        finally:
            chainer.training.Trainer.run = run

    def write(self) -> None:
        """Stop recording, and write the file. Collective."""
        if self._streams is not None:
            spans.measure_streams(None)
            self._streams.finish()
        recorded = self._recording.stop()
        run_on_root(self._comm, 0, self._where, lambda: trace.write(self._path, recorded or []))
        if recorded is not None:
            n = f"{len(recorded)} rank{'s' * (len(recorded) > 1)}"
            print(f"timeline of {n}: {self._path}{_what_to_do(self._path, recorded)}", flush=True)

    def discard(self) -> None:
        """Stop recording, without writing the file."""
        if self._streams is not None:
            spans.measure_streams(None)
        self._recording.discard()


def _what_to_do(path: Path, recorded: list[trace.Recorded]) -> str:
    if not any(span.name == "iteration" for span in recorded[0].spans):
        return f". It has no iterations: {trace.WHY_NO_ITERATIONS}"
    return f". Open it in https://ui.perfetto.dev, or run: chainermn report {path}"


@contextlib.contextmanager
def record_timeline(
    comm: Any,
    filename: str | os.PathLike[str],
    *,
    layers: bool = False,
    iterations: tuple[int, int] | None = None,
) -> Iterator[None]:
    """Record a timeline of all ranks during the ``with`` block, and write one file. Collective.

    Use it for training loops without a trainer, and mark each iteration with
    `chainermn.spans.span`. If the block raises, the file is not written.

    Parameters
    ----------
    comm : CommunicatorBase
        Communicator of the ranks to record.
    filename : path
        File to write. It is compressed if the name ends with ``.gz``.
    layers, iterations
        The parameters of `chainermn.extensions.Timeline`.

    Raises
    ------
    OSError
        On every rank, if the file cannot be written.
    ValueError
        If ``iterations`` is not a pair of a first and a last iteration.

    Examples
    --------
    >>> with chainermn.record_timeline(comm, "timeline.json"):
    ...     for i in range(1, 4):
    ...         with chainermn.spans.span("iteration", details={"iteration": i}):
    ...             optimizer.update(model, np.ones((4, 2), np.float32), np.zeros(4, np.int32))
    timeline of 2 ranks: .../timeline.json. Open it in https://ui.perfetto.dev, ...
    """
    settings = Settings(str(filename), layers, iterations)
    timeline = TimelineFile(comm.mpi_comm, settings, "record_timeline")
    try:
        with timeline.recording_trainers(), layer_spans(layers):
            yield
    except BaseException:
        timeline.discard()
        raise
    timeline.write()


def record_job(mpi_comm: MPI.Intracomm) -> None:
    """Record the whole job if its environment, which must be equal on all ranks, asks for it.

    Collective. Recording starts when the first communicator of all ranks is created.

    Parameters
    ----------
    mpi_comm : mpi4py.MPI.Intracomm
        Communicator that is being created.

    Raises
    ------
    ValueError
        If the variables are not valid.
    """
    global _timeline_of_job
    settings = Settings.from_environment()
    if settings is None or _timeline_of_job is not None:
        return
    world = load_mpi().COMM_WORLD
    if mpi_comm.size < world.size:
        if mpi_comm.rank == 0:
            warnings.warn(
                f"{VARIABLE}: recording starts when a communicator of all {world.size} ranks is "
                f"created; this one has {mpi_comm.size}",
                stacklevel=3,
            )
        return
    timeline = _timeline_of_job = TimelineFile(world, settings, VARIABLE)
    _until_the_end.enter_context(timeline.recording_trainers())
    failures.at_end(timeline.write)
