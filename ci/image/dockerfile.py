"""Carry out a Dockerfile without Docker, in a root file system made by debootstrap."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from string import Template

# The environment that Docker gives processes, to which ENV adds.
_ENVIRONMENT = {
    "HOME": "/root",
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
}
#: Release of Debian for each image that FROM may name.
RELEASES = {"debian:12": "bookworm"}
# No package may start a daemon, as in Docker's images of Debian.
_POLICY = "#!/bin/sh\nexit 101\n"
_ENTER = """
mount -t proc proc "$1/proc"
mount --rbind /sys "$1/sys"
mount --rbind /dev "$1/dev"
mount -t tmpfs -o size=1g tmpfs "$1/dev/shm"
mkdir -p "$1$2"
mount --bind "$2" "$1$2"
exec chroot "$1" /bin/sh -c "$3"
"""


class Image:
    """A root file system, and the environment of the processes in it.

    Parameters
    ----------
    root : Path
        An empty folder.
    lent : Path
        A folder of this machine, which processes see under the same path.
    env : dict
        Variables for the steps, such as where packages come from.
    """

    def __init__(self, root: Path, lent: Path, env: dict[str, str]) -> None:
        self.root = root
        self._lent = lent
        self._build_env = env
        self.env = dict(_ENVIRONMENT)

    def build(self, dockerfile: Path, context: Path) -> None:
        """Carry out all instructions; unknown ones are an error."""
        for name, value in instructions(dockerfile.read_text(encoding="utf-8")):
            match name:
                case "FROM":
                    self._debootstrap(RELEASES[value])
                case "ENV":
                    pairs = (word.split("=", 1) for word in shlex.split(value))
                    self.env |= {key: Template(text).substitute(self.env) for key, text in pairs}
                case "COPY":
                    *sources, into = shlex.split(value)
                    for source in sources:
                        self._copy(context / source, into)
                case "RUN":
                    self.run(value, **self._build_env)
                case _:
                    raise ValueError(f"{dockerfile}: {name} is not known here")

    def run(self, script: str, **env: str) -> str:
        """Run a script with the image's shell; return its output.

        Its processes end with it. They use the network of this machine, and have as much shared
        memory as docs/examples/mpijob.yaml gives a worker.
        """
        alone = ["unshare", "--mount", "--pid", "--fork", "--kill-child=KILL"]
        arguments = [str(self.root), str(self._lent), script]
        ended = subprocess.run(
            [*alone, "sh", "-ec", _ENTER, "sh", *arguments],
            env={**self.env, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if ended.returncode != 0:
            raise RuntimeError(f"{script}: exit code {ended.returncode}: {ended.stdout[-5000:]}")
        return ended.stdout

    def _debootstrap(self, release: str) -> None:
        mirror = [_mirror()] if _mirror() else []
        command = ["debootstrap", "--variant=minbase", release, str(self.root), *mirror]
        made = subprocess.run(command, capture_output=True, text=True)
        if made.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: {(made.stdout + made.stderr)[-2000:]}")
        policy = self.root / "usr/sbin/policy-rc.d"
        policy.write_text(_POLICY)
        policy.chmod(0o755)
        for name in ("resolv.conf", "hosts"):
            shutil.copyfile(Path("/etc", name), self.root / "etc" / name)

    def _copy(self, source: Path, into: str) -> None:
        target = self.root / into.lstrip("/")
        if source.is_dir():
            leave = shutil.ignore_patterns("__pycache__", ".*_cache")
            shutil.copytree(source, target, dirs_exist_ok=True, ignore=leave)
        else:
            target = target / source.name if into.endswith("/") else target
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the arguments of each instruction of a Dockerfile."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    for line in filter(None, map(str.strip, joined.splitlines())):
        name, _, value = line.partition(" ")
        yield name.upper(), value.strip()


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
