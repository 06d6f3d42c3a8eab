"""What a machine needs to emulate hosts, and what it lacks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

#: Programs, with the packages of Debian and Ubuntu that contain them.
_PACKAGES = {
    "hostname": "hostname",
    "ip": "iproute2",
    "mount": "mount",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
    "tc": "iproute2",
    "unshare": "util-linux",
}
_SLURM_PACKAGES = {
    "munged": "munge",
    "sbatch": "slurm-client",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
}
#: What Slurm loads for ``--mpi=pmix``, in /usr/lib.
_PMIX, _PMIX_PACKAGE = "*/pmix2/lib/libpmix.so.2", "libpmix2"
_WHERE_ROOT_LOOKS = "/usr/local/sbin:/usr/sbin:/sbin"


def path() -> str:
    """Return PATH including root's programs, which cron, ``env -i`` and other users lack."""
    return f"{os.environ.get('PATH', os.defpath)}:{_WHERE_ROOT_LOOKS}"


def environment() -> dict[str, str]:
    """Return the environment in which to run the programs."""
    return {**os.environ, "PATH": path()}


def find_missing(*, for_slurm: bool = False) -> str:
    """Return one line that says what this machine lacks, empty if it can emulate hosts.

    Parameters
    ----------
    for_slurm : bool
        Whether Slurm will run on them.
    """
    if sys.platform != "linux":
        return f"hosts can only be emulated on Linux, and this is {sys.platform}"
    wanted = _PACKAGES | (_SLURM_PACKAGES if for_slurm else {})
    missing = {name: wanted[name] for name in wanted if not shutil.which(name, path=path())}
    if for_slurm and not any(Path("/usr/lib").glob(_PMIX)):
        missing["libpmix.so.2"] = _PMIX_PACKAGE
    reasons = [] if os.geteuid() == 0 else ["this needs root, try sudo"]
    if missing:
        packages = sorted(set(missing.values()))
        reasons.append(f"no {', '.join(missing)} here: apt install {' '.join(packages)}")
    return "; ".join(reasons) or _try()


def _try() -> str:
    """Return what the kernel refuses, as in most containers; empty if it refuses nothing."""
    commands = [
        "mount -t tmpfs tmpfs /dev/shm",
        "ip link add bridge type bridge",
        "ip link add eth0 type veth peer name eth1",
    ]
    namespaces = ["--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "--mount-proc"]
    tried = subprocess.run(
        ["unshare", *namespaces, "sh", "-ec", "\n".join(commands)],
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if tried.returncode == 0:
        return ""
    said = " ".join(tried.stdout.split())
    return f"this machine lets nobody emulate hosts, perhaps because it is a container: {said}"
