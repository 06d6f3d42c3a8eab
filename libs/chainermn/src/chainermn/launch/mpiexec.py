"""Which ``mpiexec`` to use, and what it has to be told, for MPICH and for Open MPI."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from chainermn import remedies
from chainermn.launch.hosts import Host, fill_hosts

# Open MPI refuses to run as root, warns about fabrics that a laptop lacks, and spins while it
# waits, which starves the other ranks where there are more ranks than cores.
_OPEN_MPI_SETTINGS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_btl": "^ofi",
    "OMPI_MCA_osc": "^ucx",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}

# On a machine without ssh Open MPI forgets how many ranks it was told to put on this host, unless
# it is told not to need any.
_WITHOUT_SSH = {"openmpi": {"PRTE_MCA_plm_ssh_agent": "/bin/false"}, "mpich": {}}

#: A host that does not answer is given up after seconds instead of minutes, and one that asks for
#: a password at once.
SSH_OPTIONS = ("-o", "ConnectTimeout=4", "-o", "BatchMode=yes")
_SSH_VARIABLE = {"openmpi": "PRTE_MCA_plm_ssh_args", "mpich": "HYDRA_LAUNCHER_EXTRA_ARGS"}
#: With one of these, something else than ssh as it is configured may start ranks on other hosts.
OTHER_LAUNCHERS = (
    *("HYDRA_LAUNCHER", "HYDRA_LAUNCHER_EXEC", "HYDRA_BOOTSTRAP", "HYDRA_BOOTSTRAP_EXEC"),
    *("PRTE_MCA_plm", "PRTE_MCA_plm_ssh_agent", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"),
)

# What an mpiexec or a library says of itself, and whose it is.
_SIGNS = {
    "HYDRA": "mpich",
    "MPICH": "mpich",
    "MVAPICH": "mpich",
    "Open MPI": "openmpi",
    "OpenRTE": "openmpi",
    "prte": "openmpi",
}
NAMES = {"mpich": "MPICH", "openmpi": "Open MPI", "": "neither MPICH nor Open MPI"}


class MpiError(RuntimeError):
    """MPI is not installed, or not as it should be.

    Attributes
    ----------
    found, remedy, command : str
        What is wrong, what to do, and what to type.
    """

    def __init__(self, found: str, remedy: str, command: str) -> None:
        self.found, self.remedy, self.command = found, remedy, command
        super().__init__(f"{found}; {remedy}: {command}")


def mpiexec_candidates() -> list[Path]:
    """Return every ``mpiexec``: that of this Python environment, then those on ``PATH``."""
    folders = [sysconfig.get_path("scripts"), *os.environ.get("PATH", "").split(os.pathsep)]
    # Debian keeps the mpiexec of each MPI under a name of its own.
    names = ("mpiexec", "mpiexec.mpich", "mpiexec.openmpi")
    paths = (Path(folder, name) for folder in folders if folder for name in names)
    return list(dict.fromkeys(path for path in paths if os.access(path, os.X_OK)))


@functools.cache
def mpiexec_version(mpiexec: Path) -> str:
    """Return what ``mpiexec --version`` prints, or why it does not run."""
    try:
        shown = subprocess.run(
            [mpiexec, "--version"],
            capture_output=True,
            text=True,
            env={**os.environ, **_OPEN_MPI_SETTINGS},
            stdin=subprocess.DEVNULL,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (shown.stdout + shown.stderr).strip()


def flavour_of(mpiexec: Path) -> str:
    """Return ``'mpich'`` or ``'openmpi'``: whose ``mpiexec`` this is; empty if neither's."""
    return _flavour(mpiexec_version(mpiexec))


@functools.cache
def mpi4py_library() -> str:
    """Return name and version of the MPI library that mpi4py loads, without initialising it.

    Raises
    ------
    MpiError
        If mpi4py cannot be imported or finds no library.
    """
    code = (
        "import mpi4py; mpi4py.rc.initialize = False; "
        "from mpi4py import MPI; print(MPI.Get_library_version())"
    )
    try:
        shown = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=60,
        )
    except subprocess.TimeoutExpired as error:
        raise _cannot_load_mpi(str(error)) from None
    if shown.returncode:
        lines = shown.stderr.strip().splitlines() or [f"exit code {shown.returncode}"]
        raise _cannot_load_mpi(lines[-1])
    # All that Open MPI adds in the same line says where it was built.
    first = shown.stdout.strip("\0 \n").splitlines()[0].partition(", package:")[0]
    return " ".join(first.split())


@functools.cache
def find_mpiexec() -> Path:
    """Return the ``mpiexec`` of the MPI that mpi4py uses: beside this Python, else on ``PATH``.

    Raises
    ------
    FileNotFoundError
        If there is none.
    MpiError
        If mpi4py cannot be imported or finds no library, or if there are only those of other
        MPIs: their ranks would not find each other.
    """
    candidates = mpiexec_candidates()
    if not candidates:
        raise FileNotFoundError(
            "no mpiexec beside this Python or on PATH; "
            f"install an MPI, for example: {remedies.install_mpi()}"
        )
    library = mpi4py_library()
    for candidate in candidates:
        if flavour_of(candidate) and flavour_of(candidate) == _flavour(library):
            return candidate
    found = ", ".join(f"{path} ({NAMES[flavour_of(path)]})" for path in candidates)
    raise MpiError(
        f"mpi4py uses {library}, but none of these mpiexec belongs to it: {found}",
        "put the mpiexec of that MPI on PATH, or install an MPI that has one, for example",
        remedies.install_mpi(),
    )


def mpi_flavour() -> str:
    """Return ``'mpich'`` or ``'openmpi'``: whose ``mpiexec`` :func:`find_mpiexec` found."""
    return flavour_of(find_mpiexec())


def launch_environment(
    hosts: Sequence[Host] | None = None, *, network: str | None = None
) -> dict[str, str]:
    """Return this process' environment with what ``mpiexec`` needs to run anywhere.

    Variables that the user has set stay as they are.

    Parameters
    ----------
    hosts : sequence of (str, int), optional
        Where the ranks run; on this host alone by default.
    network : str, optional
        Address range, as ``10.0.0.0/24``, to which Open MPI keeps its connections. MPICH finds
        its way by itself.
    """
    return {**launch_settings(hosts, network=network), **os.environ}


def launch_settings(
    hosts: Sequence[Host] | None = None, *, network: str | None = None
) -> dict[str, str]:
    """Return what :func:`launch_environment` adds, before the user's own variables."""
    flavour = mpi_flavour()
    settings = dict(_OPEN_MPI_SETTINGS) if flavour == "openmpi" else {}
    if hosts is None:
        settings |= _WITHOUT_SSH[flavour]
    elif starts_by_ssh():  # MPICH would give them to another launcher, too
        settings[_SSH_VARIABLE[flavour]] = " ".join(SSH_OPTIONS)
    if network and flavour == "openmpi":
        settings["OMPI_MCA_btl_tcp_if_include"] = network
    return settings


def starts_by_ssh() -> bool:
    """Return whether mpiexec starts ranks on other hosts by ssh, and nothing else may."""
    return not any(os.environ.get(name) for name in OTHER_LAUNCHERS)


def mpiexec_command(
    ranks: int,
    arguments: Sequence[str | os.PathLike[str]],
    *,
    python: bool = True,
    hosts: Sequence[Host] | None = None,
    forward: Sequence[str] = (),
) -> list[str]:
    """Return the command line that starts ``ranks`` ranks.

    Parameters
    ----------
    ranks : int
    arguments : sequence of str
        What each rank's Python is given: a script and its arguments, or ``-m module``.
    python : bool
        If false, ``arguments`` are a whole command themselves.
    hosts : sequence of (str, int), optional
        Names of hosts and how many ranks each takes; the first ones are filled first. This host
        alone by default.
    forward : sequence of str
        Environment variables that the ranks on other hosts get too. MPICH forwards all of them
        anyway, Open MPI otherwise only its own.

    Raises
    ------
    ValueError
        If the hosts take fewer ranks.
    """
    flavour = mpi_flavour()
    placement: list[str] = []
    if hosts is not None:
        option = {"openmpi": "--host", "mpich": "-hosts"}[flavour]
        filled = fill_hosts(hosts, ranks)
        placement = [option, ",".join(f"{name}:{places}" for name, places in filled)]
    elif flavour == "openmpi":
        # Which otherwise refuses more ranks than cores.
        placement = ["--host", f"localhost:{ranks}"]
    exports = [part for name in forward for part in ("-x", name)] if flavour == "openmpi" else []
    program = [sys.executable, *arguments] if python else arguments
    command = [find_mpiexec(), *placement, *exports, "-n", str(ranks), *program]
    return [os.fspath(part) for part in command]


def _cannot_load_mpi(error: str) -> MpiError:
    found = f"mpi4py cannot load an MPI library: {error}"
    return MpiError(found, "give it one that it can load", remedies.load_mpi(error))


def _flavour(version: str) -> str:
    return next((flavour for sign, flavour in _SIGNS.items() if sign in version), "")
