"""Run nox in a minimal Debian, as a new user would: ``nox -s minimal_systems``.

The system has git, ca-certificates, python3 and python3-venv and nothing else, like a slim
container, and as little shared memory as the doctor accepts. Arguments are the release of Debian,
then those of ``noxw``.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ci.image.system import System

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ["git", "ca-certificates", "python3", "python3-venv"]
PRIVATE = [".nox", ".noxw", ".venv", ".*_cache", "__pycache__", "_build"]
# Certificates that this machine trusts besides Debian's.
OWN_CERTIFICATES = "usr/local/share/ca-certificates"


def main(release: str, *arguments: str) -> int:
    """Make the system, copy the checkout into it, and return the exit code of noxw."""
    with tempfile.TemporaryDirectory(prefix="minimal-") as folder:
        system = System(Path(folder, "root"), Path(folder), shared_memory="128m")
        system.debootstrap(release, *PACKAGES)
        if Path("/", OWN_CERTIFICATES).is_dir():
            certificates = system.root / OWN_CERTIFICATES
            shutil.copytree(Path("/", OWN_CERTIFICATES), certificates, dirs_exist_ok=True)
            system.run("update-ca-certificates")
        checkout = system.root / "root/checkout"
        shutil.copytree(ROOT, checkout, ignore=shutil.ignore_patterns(*PRIVATE), symlinks=True)
        settings = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        script = f"cd /root/checkout && {shlex.join(['./noxw', *arguments])}"
        env = {**system.env, **settings}
        return subprocess.run(system.command(script), env=env, stdin=subprocess.DEVNULL).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
