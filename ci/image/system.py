"""Root file systems of Debian, and processes in them: needs root and debootstrap."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

# The environment that Docker gives processes.
_ENVIRONMENT = {
    "HOME": "/root",
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
}
# No package may start a daemon, as in Docker's images of Debian.
_POLICY = "#!/bin/sh\nexit 101\n"
_ENTER = """
mount -t proc proc "$1/proc"
mount --rbind /sys "$1/sys"
mount --rbind /dev "$1/dev"
mount -t tmpfs -o "size=$4" tmpfs "$1/dev/shm"
mkdir -p "$1$2"
mount --bind "$2" "$1$2"
exec chroot "$1" /bin/sh -c "$3"
"""


class System:
    """A root file system, and the environment of the processes in it.

    Parameters
    ----------
    root : Path
        An empty folder.
    lent : Path
        A folder of this machine, which processes see under the same path.
    shared_memory : str
        The size of ``/dev/shm``; by default, what docs/examples/mpijob.yaml gives a worker.
    """

    def __init__(self, root: Path, lent: Path, *, shared_memory: str = "1g") -> None:
        self.root = root
        self._lent = lent
        self._shared_memory = shared_memory
        self.env = dict(_ENVIRONMENT)

    def debootstrap(self, release: str, *packages: str) -> None:
        """Install a release of Debian with only its base and some packages."""
        mirror = [_mirror()] if _mirror() else []
        include = [f"--include={','.join(packages)}"] if packages else []
        command = ["debootstrap", "--variant=minbase", *include, release, str(self.root), *mirror]
        made = subprocess.run(command, capture_output=True, text=True)
        if made.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: {(made.stdout + made.stderr)[-2000:]}")
        policy = self.root / "usr/sbin/policy-rc.d"
        policy.write_text(_POLICY)
        policy.chmod(0o755)
        for name in ("resolv.conf", "hosts"):
            shutil.copyfile(Path("/etc", name), self.root / "etc" / name)

    def run(self, script: str, **env: str) -> str:
        """Run a script with the system's shell; return its output."""
        ended = subprocess.run(
            self.command(script),
            env={**self.env, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if ended.returncode != 0:
            raise RuntimeError(f"{script}: exit code {ended.returncode}: {ended.stdout[-5000:]}")
        return ended.stdout

    def command(self, script: str) -> list[str]:
        """Return a command of this machine that runs a script with the system's shell.

        The processes of the script end with it. They use the network of this machine.
        """
        alone = ["unshare", "--mount", "--pid", "--fork", "--kill-child=KILL"]
        where = [str(self.root), str(self._lent)]
        return [*alone, "sh", "-ec", _ENTER, "sh", *where, script, self._shared_memory]


def _mirror() -> str:
    """Return the mirror of Debian that apt uses on this machine; empty if it has none."""
    if shutil.which("apt-get") is None:
        return ""
    shown = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"],
        capture_output=True,
        text=True,
    )
    archives = (line for line in shown.stdout.splitlines() if re.search(r"/debian/?$", line))
    return next(archives, "")
