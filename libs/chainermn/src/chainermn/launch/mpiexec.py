"""Find the right ``mpiexec``, and its options and variables, for MPICH and Open MPI."""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from chainermn import remedies
from chainermn.launch.hosts import Host, fill_hosts, show_places
from chainermn.process.patience import run_patiently

# By default, Open MPI refuses to run as root, warns about fabrics that a laptop does not have, and
# spins while it waits, which starves the other ranks if there are more ranks than cores.
_OPEN_MPI_SETTINGS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_btl": "^ofi",
    "OMPI_MCA_osc": "^ucx",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}

# On a machine without ssh, Open MPI forgets how many ranks this host takes unless this says that
# it does not need ssh.
_WITHOUT_SSH = {"openmpi": {"PRTE_MCA_plm_ssh_agent": "/bin/false"}, "mpich": {}}

#: Give up on a silent host after seconds instead of minutes, and immediately on one that asks for
#: a password.
SSH_OPTIONS = ("-o", "ConnectTimeout=4", "-o", "BatchMode=yes")
_SSH_VARIABLE = {"openmpi": "PRTE_MCA_plm_ssh_args", "mpich": "HYDRA_LAUNCHER_EXTRA_ARGS"}
# Variables that choose the program that starts ranks on other hosts.
_CHOICES = (
    *("HYDRA_LAUNCHER", "HYDRA_LAUNCHER_EXEC", "HYDRA_BOOTSTRAP", "HYDRA_BOOTSTRAP_EXEC"),
    *("PRTE_MCA_plm", "PRTE_MCA_plm_ssh_agent"),
)
#: If one of these is set, something other than ssh may start ranks on other hosts.
OTHER_LAUNCHERS = (*_CHOICES, "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")

# Words in the version of an mpiexec or a library that reveal which MPI it belongs to.
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
    """Raised if MPI is missing or installed wrongly, with a remedy and the command to type."""

    def __init__(self, found: str, remedy: str, command: str) -> None:
        self.found, self.remedy, self.command = found, remedy, command
        super().__init__(f"{found}; {remedy}: {command}")


def mpiexec_candidates() -> list[Path]:
    """Return every ``mpiexec`` in this Python environment, then those on ``PATH``."""
    folders = [sysconfig.get_path("scripts"), *os.environ.get("PATH", "").split(os.pathsep)]
    # Debian gives the mpiexec of each MPI its own name.
    names = ("mpiexec", "mpiexec.mpich", "mpiexec.openmpi")
    paths = (Path(folder, name) for folder in folders if folder for name in names)
    return list(dict.fromkeys(path for path in paths if os.access(path, os.X_OK)))


@functools.cache
def mpiexec_version(mpiexec: Path) -> str:
    """Return the output of ``mpiexec --version``, or the reason why it does not run."""
    try:
        environment = {**os.environ, **_OPEN_MPI_SETTINGS}
        shown = run_patiently([mpiexec, "--version"], 30, env=environment)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (shown.stdout + shown.stderr).strip()


def flavor_of(mpiexec: Path) -> str:
    """Return the MPI that an ``mpiexec`` belongs to: ``'mpich'``, ``'openmpi'`` or ``''``."""
    return _flavor(mpiexec_version(mpiexec))


@functools.cache
def mpi4py_library() -> str:
    """Return the name and version of mpi4py's MPI library, without initializing MPI."""
    code = (
        "import mpi4py; mpi4py.rc.initialize = False; "
        "from mpi4py import MPI; print(MPI.Get_library_version())"
    )
    try:
        shown = run_patiently([sys.executable, "-P", "-c", code], 60)
    except subprocess.TimeoutExpired as error:
        raise _cannot_load_mpi(str(error)) from None
    if shown.returncode:
        lines = shown.stderr.strip().splitlines() or [f"exit code {shown.returncode}"]
        raise _cannot_load_mpi(lines[-1])
    # Open MPI's line continues with where it was built.
    first = shown.stdout.strip("\0 \n").splitlines()[0].partition(", package:")[0]
    return " ".join(first.split())


@functools.cache
def find_mpiexec() -> Path:
    """Find the ``mpiexec`` of the MPI that mpi4py uses: beside this Python, then on ``PATH``.

    Raises FileNotFoundError if there is no ``mpiexec``, and `MpiError` if mpi4py finds no library
    if every ``mpiexec`` belongs to another MPI, whose ranks would not find each other, or if it
    would not start.
    """
    candidates = mpiexec_candidates()
    if not candidates:
        raise FileNotFoundError(
            "there is no mpiexec beside this Python or on PATH; "
            f"install an MPI, for example: {remedies.install_mpi()}"
        )
    library = mpi4py_library()
    for candidate in candidates:
        if flavor_of(candidate) and flavor_of(candidate) == _flavor(library):
            if flavor_of(candidate) == "openmpi" and "HOME" not in os.environ:
                home = os.path.expanduser("~")
                home = home if os.path.isabs(home) else tempfile.gettempdir()
                raise MpiError(
                    "Open MPI does not start without the variable HOME, which is not set",
                    "set it",
                    f"export HOME={shlex.quote(home)}",
                )
            return candidate
    found = ", ".join(f"{path} ({NAMES[flavor_of(path)]})" for path in candidates)
    raise MpiError(
        f"mpi4py uses {library}, but every mpiexec found belongs to another MPI: {found}",
        "put the mpiexec of that MPI on PATH, or install an MPI that includes one, for example",
        remedies.install_mpi(),
    )


def mpi_flavor() -> str:
    """Return the MPI of the ``mpiexec`` in use: ``'mpich'`` or ``'openmpi'``."""
    return flavor_of(find_mpiexec())


def launch_environment(
    hosts: Sequence[Host] | None = None, *, network: str | None = None
) -> dict[str, str]:
    """Return this process's environment, plus the variables that ``mpiexec`` needs.

    Variables that the user has set stay as they are. ``network`` restricts Open MPI to an address
    range such as ``10.0.0.0/24``; MPICH finds the right network by itself.
    """
    return {**launch_settings(hosts, network=network), **os.environ}


def launch_settings(
    hosts: Sequence[Host] | None = None, *, network: str | None = None
) -> dict[str, str]:
    """Return the variables that :func:`launch_environment` adds unless the user has set them."""
    flavor = mpi_flavor()
    settings = dict(_OPEN_MPI_SETTINGS) if flavor == "openmpi" else {}
    if hosts is None or shutil.which("ssh") is None:
        settings |= _WITHOUT_SSH[flavor]
    # MPICH would also pass these options to another launcher.
    if hosts is not None and starts_by_ssh():
        settings[_SSH_VARIABLE[flavor]] = " ".join(SSH_OPTIONS)
    if network and flavor == "openmpi":
        settings["OMPI_MCA_btl_tcp_if_include"] = network
    return settings


def own_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the names of the variables to pass to ranks on other hosts in any case."""
    return sorted(name for name in environment if name.startswith("CHAINER"))


def starts_by_ssh() -> bool:
    """Tell whether mpiexec starts ranks on other hosts by ssh."""
    return not any(os.environ.get(name) for name in OTHER_LAUNCHERS)


def starts_by_srun() -> bool:
    """Tell whether mpiexec starts ranks on other hosts by Slurm's srun."""
    return "SLURM_JOB_ID" in os.environ and not any(map(os.environ.get, _CHOICES))


def mpiexec_command(
    ranks: int,
    arguments: Sequence[str | os.PathLike[str]],
    *,
    python: bool = True,
    hosts: Sequence[Host] | None = None,
    forward: Sequence[str] = (),
) -> list[str]:
    """Return the command line that starts ``ranks`` ranks, on this host by default.

    ``arguments`` are passed to each rank's Python, or are a whole command if ``python`` is false.
    Hosts are filled in order. MPICH passes all environment variables to other hosts; Open MPI
    passes its own variables and those to ``forward``.
    """
    flavor = mpi_flavor()
    placement: list[str] = []
    if hosts is not None:
        option = {"openmpi": "--host", "mpich": "-hosts"}[flavor]
        filled = fill_hosts(hosts, ranks)
        placement = [option, show_places(filled)]
    elif flavor == "openmpi":
        # Without this, Open MPI refuses to start more ranks than cores.
        placement = ["--host", f"localhost:{ranks}"]
    exports = [part for name in forward for part in ("-x", name)] if flavor == "openmpi" else []
    program = [sys.executable, *arguments] if python else arguments
    if ":" in program:
        raise ValueError(
            "mpiexec starts another program after an argument ':'; make the colon part of "
            "another argument instead, as in --between=:"
        )
    command = [find_mpiexec(), *placement, *exports, "-n", str(ranks), *program]
    return [os.fspath(part) for part in command]


def _cannot_load_mpi(error: str) -> MpiError:
    found = f"mpi4py cannot load an MPI library: {error}"
    return MpiError(found, "install one that it can load", remedies.load_mpi(error))


def _flavor(version: str) -> str:
    return next((flavor for sign, flavor in _SIGNS.items() if sign in version), "")
