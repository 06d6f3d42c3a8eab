"""What a machine needs for emulated hosts, and what it lacks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

#: Programs, and the packages of Debian and Ubuntu that have them.
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
_WHERE_ROOT_LOOKS = "/usr/local/sbin:/usr/sbin:/sbin"


def path() -> str:
    """Return PATH with root's programs, which cron, ``env -i`` and plain accounts leave out."""
    return f"{os.environ.get('PATH', os.defpath)}:{_WHERE_ROOT_LOOKS}"


def environment() -> dict[str, str]:
    """Return the environment in which to run the programs."""
    return {**os.environ, "PATH": path()}


def find_missing() -> str:
    """Return in one line what this machine lacks; nothing if it can have hosts."""
    if sys.platform != "linux":
        return f"only Linux has what hosts are made of, and this is {sys.platform}"
    missing = [program for program in _PACKAGES if not shutil.which(program, path=path())]
    reasons = [] if os.geteuid() == 0 else ["this needs root, try sudo"]
    if missing:
        packages = sorted({_PACKAGES[program] for program in missing})
        reasons.append(f"no {', '.join(missing)} here: apt install {' '.join(packages)}")
    return "; ".join(reasons) or _try()


def _try() -> str:
    """Return what the kernel refuses, as it does in most containers; nothing if nothing."""
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
    return f"this machine does not let root make hosts, perhaps as it is a container: {said}"
