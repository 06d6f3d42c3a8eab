"""What a bug report has to say about an installation."""

from __future__ import annotations

import os
import platform
import socket
import sys
from importlib import metadata

import chainermn
from chainermn.doctor.setup import Setup
from chainermn.launch.mpiexec import mpi4py_library

_DISTRIBUTIONS = ("chainer", "chainer-compat", "numpy", "mpi4py")


def collect(setup: Setup) -> dict[str, str]:
    """Return versions by name, without importing what may fail to import."""
    cupy = metadata.packages_distributions().get("cupy", [])
    try:
        system = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        system = platform.system()
    return {
        "host": socket.gethostname(),
        "system": f"{system}, kernel {platform.release()}, {platform.machine()}",
        "cores": f"{setup.cores} of {os.cpu_count()}",
        "Python": f"{platform.python_version()} ({sys.executable})",
        "chainermn": f"{chainermn.__version__} ({os.path.dirname(chainermn.__file__ or '')})",
        **{name: _version(name) for name in (*_DISTRIBUTIONS, *sorted(set(cupy)))},
        "MPI": _mpi(),
    }


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _mpi() -> str:
    try:
        return mpi4py_library()
    except RuntimeError as error:
        return str(error)
