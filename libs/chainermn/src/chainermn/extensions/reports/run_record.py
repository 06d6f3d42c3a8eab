"""Record how a run was started."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chainermn.agreement import run_on_root
from chainermn.arguments import check_communicator
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.files import atomic_write

_PACKAGES = ("chainermn", "chainer", "chainer-compat", "chainer-fast", "numpy", "mpi4py")
_WHERE = "record_run"


def record_run(
    comm: CommunicatorBase, arguments: Mapping[str, Any], out: str | os.PathLike[str]
) -> None:
    """Write a file ``run.json`` that records how a run was started. Collective.

    The file has the keys ``command``, ``arguments``, ``started`` (with the time zone), ``ranks``,
    ``hosts`` (by rank), ``versions`` and ``git``. The last one is the commit of the script's
    folder and whether files have changed since then, or null outside a git repository. A run that
    resumes replaces the file.

    Parameters
    ----------
    comm : CommunicatorBase
        Communicator of all ranks.
    arguments : mapping
        Arguments of the run, such as ``vars(args)``. Values that JSON does not support are
        written as text.
    out : path
        Folder of the file, which is created if it does not exist.

    Raises
    ------
    OSError
        On rank 0, if it cannot write the file; other ranks raise RuntimeError with the same
        message.

    Examples
    --------
    >>> chainermn.extensions.record_run(comm, {"batchsize": 32}, "result")
    >>> import json
    >>> from pathlib import Path
    >>> record = json.loads(Path("result/run.json").read_text())
    >>> record["ranks"], record["arguments"]
    (2, {'batchsize': 32})
    """
    check_communicator(f"{_WHERE}(comm, arguments, out)", comm, arguments)
    hosts = comm.allgather_obj(socket.gethostname())

    def write() -> None:
        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        record = {
            "command": [sys.executable, *sys.argv],
            "arguments": dict(arguments),
            "started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            "ranks": comm.size,
            "hosts": hosts,
            "versions": _versions(),
            "git": _git(Path(sys.argv[0]).resolve().parent),
        }
        text = json.dumps(record, indent=1, default=str, ensure_ascii=False) + "\n"
        with atomic_write(folder / "run.json", "wb") as file:
            # Names of files that are not UTF-8 become JSON's escapes.
            file.write(text.encode(errors="backslashreplace"))

    run_on_root(comm, 0, _WHERE, write)


def _versions() -> dict[str, str]:
    from mpi4py import MPI

    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        found[package] = importlib.metadata.version(package)
    if "cupy" in sys.modules:
        found["cupy"] = sys.modules["cupy"].__version__
    found["mpi"] = MPI.Get_library_version().splitlines()[0].rstrip("\0 ")
    return found


def _git(folder: Path) -> dict[str, Any] | None:
    """Return the commit of a folder, and whether tracked files have changed there."""
    # Without a lock, because somebody may work in that repository.
    command = ["git", "--no-optional-locks", "-C", str(folder), "status"]
    command += ["--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        shown = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):  # no git, or no repository
        return None
    lines = shown.splitlines()
    about = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# "))
    commit = about["branch.oid"]
    if commit == "(initial)":
        return None
    return {"commit": commit, "changed": len(lines) > len(about)}
