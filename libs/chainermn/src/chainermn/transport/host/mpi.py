"""Load MPI, and provide its collectives on flat arrays in host memory."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Literal, cast

import numpy as np

from chainermn.notes import note_once
from chainermn.process.cores import cores_of_job
from chainermn.process.garbage import no_garbage_collection
from chainermn.process.processes import numbers_in
from chainermn.process.waking import wake_up_rarely
from chainermn.transport.reducer import Array

if TYPE_CHECKING:
    from mpi4py import MPI


Op = Literal["sum", "mean", "max", "min", "prod"]

#: Several threads may call MPI at the same time, or one at a time, or only the main thread may.
ThreadSupport = Literal["multiple", "serialized", "funneled"]

# Highest tag that every MPI supports. Users' messages on the same communicator have tags from 0
# upwards, and must not be confused with messages inside a collective.
_COLLECTIVE_TAG = 32767

#: Most elements of an array in one call, since MPI counts them in a C int.
MAX_COUNT = 2**30

# Variables in which each MPI's mpiexec passes the number of processes.
_LAUNCHER_SIZES = {"PMI_SIZE": "MPICH", "OMPI_COMM_WORLD_SIZE": "Open MPI"}
# The same variable of srun, which is inherited by everything that srun's processes start.
_SRUN_SIZE = "SLURM_STEP_NUM_TASKS"

# Open MPI sends messages up to this size to another host immediately. Longer ones wait until the
# receiver has agreed, which both ends notice only in their next MPI call: then less of an exchange
# overlaps with computation, and it takes longer. The environment and mpiexec can override this,
# but Open MPI's parameter files cannot.
_EAGER_LIMIT = ("OMPI_MCA_btl_tcp_eager_limit", str(1 << 20))


# With more ranks than cores, a rank that waits for a message leaves its core to the others.
# Without this, a barrier of four ranks on two cores took ten times as long (MPICH 5.0.2).
_TAKING_TURNS = {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}


def load_mpi() -> ModuleType:
    """Import ``mpi4py.MPI``, which initializes MPI, and return it.

    Before the import, sets environment variables for how Open MPI sends messages to other hosts,
    and for how ranks wait if there are more of them than cores. Variables that are already set
    stay as they are. This has no effect if the script has already initialized MPI.

    A child that this process forks leaves MPI alone when it ends.

    Raises a RuntimeError if no MPI library can be loaded, if ``mpiexec`` belongs to a different
    MPI, or if ``srun`` does not know which one: each process would then be a separate job.
    """
    try:
        _load()
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        from chainermn import remedies

        raise RuntimeError(
            f"mpi4py cannot load an MPI library: {error}\n"
            f"Install one that it can load: {remedies.load_mpi(str(error))}"
        ) from error
    if MPI.COMM_WORLD.size == 1:
        _check_alone(MPI)
    return MPI


def _prepare() -> None:
    os.environ.setdefault(*_EAGER_LIMIT)
    numbers = numbers_in(os.environ)
    if numbers is not None and numbers.local_size > (n_cores := cores_of_job()):
        for variable, value in _TAKING_TURNS.items():
            os.environ.setdefault(variable, value)
        wake_up_rarely(numbers.local_size / n_cores)


@functools.cache
def _load() -> None:
    """Import ``mpi4py.MPI`` if necessary, and keep forked children from finalizing MPI.

    mpi4py calls ``MPI_Finalize`` as any process ends that has loaded it, or whose parent has.
    """
    from mpi4py import rc

    if "mpi4py.MPI" not in sys.modules:
        _prepare()
        is_ours = rc.finalize is None
        if is_ours:
            rc.finalize = False
        with no_garbage_collection():
            importlib.import_module("mpi4py.MPI")
        if is_ours and rc.initialize:
            atexit.register(_finalize, os.getpid())
    if rc.finalize is not False:
        os.register_at_fork(after_in_child=lambda: atexit.register(_end_child))


def _finalize(pid: int) -> None:
    from mpi4py import MPI

    if os.getpid() == pid and not MPI.Is_finalized():
        with contextlib.suppress(MPI.Exception):  # nobody may have received a message; as mpi4py
            MPI.Finalize()


def _end_child() -> None:
    """End a forked child before mpi4py finalizes the MPI of its parent."""
    note_once(
        f"process {os.getpid()}, which rank {world().rank} has forked, gets exit code 1, as "
        "sys.exit and the end of the script would also finalize MPI. End it by os._exit, or call "
        "create_communicator before the first import of mpi4py.MPI, with mpi4py.rc.finalize unset"
    )
    sys.stdout.flush()
    os._exit(1)


def _check_alone(mpi: ModuleType) -> None:
    """Raise RuntimeError if this process was started with others that MPI does not know."""
    # Open MPI's line continues with where it was built.
    library = " ".join(
        mpi.Get_library_version().splitlines()[0].partition(", package:")[0].split()
    )
    # Inside a job step of Slurm, mpiexec's variables count. But srun --mpi=pmi2 sets MPICH's, too.
    is_by_srun = _SRUN_SIZE in os.environ and "MPI_LOCALNRANKS" not in os.environ
    names = [name for name in _LAUNCHER_SIZES if not (is_by_srun and name == "PMI_SIZE")]
    sizes = {name: _number(name) for name in (*names, _SRUN_SIZE)}
    for name in names:
        if sizes[name] > 1:
            raise RuntimeError(
                f"mpiexec of {_LAUNCHER_SIZES[name]} started {sizes[name]} processes, but each of "
                f"them is alone: mpi4py uses another MPI ({library}). Start the job with the "
                "mpiexec of that MPI; if pip installed it, that is beside the Python executable"
            )
    if sizes[_SRUN_SIZE] > 1 and not any(sizes[name] for name in names):
        language = "pmix" if mpi.get_vendor()[0] == "Open MPI" else "pmi2"
        raise RuntimeError(
            f"srun started {sizes[_SRUN_SIZE]} processes, but each of them is alone: it did not "
            f"prepare them for the MPI that mpi4py uses ({library}). Start the job with "
            f"srun --mpi={language}, or with chainermn launch instead of srun. If each process is "
            f"meant to be a separate job, unset {_SRUN_SIZE}"
        )


def _number(variable: str) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else 0


def world() -> MPI.Intracomm:
    """Return ``MPI.COMM_WORLD``, initializing MPI if necessary."""
    return cast("MPI.Intracomm", load_mpi().COMM_WORLD)


def thread_support(n_hosts: int) -> ThreadSupport:
    """Return how threads may call MPI in a job on ``n_hosts`` hosts.

    Open MPI claims that several may call it at the same time, but this is only true on one host:
    while one thread waited in a collective and another tested a second one, messages to other
    hosts were never sent, and the job hung (5.0.11 over TCP, two ranks on each of two hosts; on
    some networks in every job). With one thread at a time, it does not hang.
    """
    mpi = load_mpi()
    provided = mpi.Query_thread()
    if provided >= mpi.THREAD_MULTIPLE and (n_hosts == 1 or mpi.get_vendor()[0] != "Open MPI"):
        return "multiple"
    return "serialized" if provided >= mpi.THREAD_SERIALIZED else "funneled"


class MpiTransport:
    """Collectives over the ranks of an MPI communicator, on arrays in host memory.

    Every array is one-dimensional and C-contiguous, and has the same length and dtype on all
    ranks. Results replace the contents of ``array``.
    """

    def __init__(self, mpi_comm: MPI.Intracomm) -> None:
        self.mpi_comm = mpi_comm
        self.rank: int = mpi_comm.rank
        self.size: int = mpi_comm.size
        self._mpi = load_mpi()

    def allreduce(self, array: Array, op: Op = "sum") -> None:
        """Reduce the arrays of all ranks elementwise; every rank gets the result.

        Elements are integers, bool or floats; float16 is reduced in float32.
        """
        if array.dtype == np.float16:
            wide = array.astype(np.float32)
            self.allreduce(wide, op)
            with np.errstate(over="ignore"):
                array[...] = wide
            return
        mpi_op = self._mpi.SUM if op == "mean" else getattr(self._mpi, op.upper())
        for chunk in _chunks(array):
            self.mpi_comm.Allreduce(self._mpi.IN_PLACE, chunk, mpi_op)
        if op == "mean":
            np.divide(array, self.size, out=array)

    def bcast(self, array: Array, root: int = 0) -> None:
        """Give every rank the array of ``root``."""
        for chunk in _chunks(array.view(np.uint8)):
            self.mpi_comm.Bcast(chunk, root)

    def send(self, array: Array, dest: int, tag: int = _COLLECTIVE_TAG) -> None:
        """Send ``array`` to ``dest``, which calls :meth:`recv`."""
        for chunk in _chunks(array.view(np.uint8)):
            self.mpi_comm.Send(chunk, dest, tag)

    def recv(self, array: Array, source: int, tag: int = _COLLECTIVE_TAG) -> None:
        """Receive ``array`` from ``source``, which calls :meth:`send`."""
        for chunk in _chunks(array.view(np.uint8)):
            self.mpi_comm.Recv(chunk, source, tag)

    def sendrecv(self, array: Array, dest: int, into: Array, source: int) -> None:
        """Send ``array`` to ``dest`` while receiving ``into`` from ``source``."""
        chunks = _chunks(array.view(np.uint8))
        outgoing = [self.mpi_comm.Isend(chunk, dest, _COLLECTIVE_TAG) for chunk in chunks]
        self.recv(into, source)
        for request in outgoing:
            request.Wait()


def _chunks(array: Array) -> Iterator[Array]:
    for start in range(0, array.size, MAX_COUNT):
        yield array[start : start + MAX_COUNT]
