"""The files from which hosts know each other: names, addresses and keys."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

NETWORK = "10.77.0"
#: For temporary files. Hosts share /tmp, where Open MPI names a folder after its pid alone. If a
#: job on another host has the same pid, or left such a folder, Open MPI ends with exit code 213.
OWN_FOLDER = "/run/tmp"
#: Ssh passes this variable on; jobs of `chainermn.testing.mpiexec` set it.
FORWARDED = "CHAINERMN_TESTING_JOB"

_SSHD_CONFIG = f"""\
HostKey /etc/ssh/host_key
PidFile /run/sshd.pid
AuthorizedKeysFile /etc/ssh/id.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
StrictModes no
UsePAM no
UseDNS no
MaxStartups 100
AcceptEnv {FORWARDED}
SetEnv TMPDIR={OWN_FOLDER}
"""
# OpenSSH's default takes eight times as long: 70 ms of a core for each connection.
_SSH_CONFIG = f"""\
Host *
    IdentityFile /etc/ssh/id
    GlobalKnownHostsFile /etc/ssh/known_hosts
    UserKnownHostsFile /dev/null
    StrictHostKeyChecking yes
    KexAlgorithms curve25519-sha256
    LogLevel ERROR
    SendEnv {FORWARDED}
"""


def address(index: int) -> str:
    """Return the IPv4 address of host number ``index``."""
    return f"{NETWORK}.{index + 1}"


def write(folder: Path, names: Sequence[str]) -> None:
    """Write the files that every host needs into an empty folder.

    Parameters
    ----------
    folder : path
        Gets ``hostfile``, with one host per line, and ``etc``, whose files hide those of the
        same names in the machine's ``/etc``.
    names : sequence of str
        Names of the hosts, in the order of their addresses.
    """
    ssh = folder / "etc/ssh"
    ssh.mkdir(parents=True)
    for path in (folder / "etc", ssh):
        path.chmod(0o755)
    for key in ("id", "host_key"):
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(ssh / key))
    kind, public_key = (ssh / "host_key.pub").read_text().split()[:2]
    (ssh / "known_hosts").write_text(f"* {kind} {public_key}\n")
    (ssh / "sshd_config").write_text(_SSHD_CONFIG)
    (ssh / "ssh_config").write_text(_SSH_CONFIG)

    lines = [f"{address(index)} {name}" for index, name in enumerate(names)]
    (folder / "etc/hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
    (folder / "hostfile").write_text("\n".join([*names, ""]))

    # A shell must not read settings meant for this machine alone, such as locks.
    _write_accounts(folder / "etc/passwd", 6, "/bin/sh")
    # Sshd refuses even keys for a locked account, which root's is on Ubuntu.
    _write_accounts(folder / "etc/shadow", 1, "*")


def _write_accounts(path: Path, field: int, value: str) -> None:
    """Copy the machine's file of this name, with one field of root's line changed."""
    path.touch(0o600 if path.name == "shadow" else 0o644)
    accounts = [line.split(":") for line in Path("/etc", path.name).read_text().splitlines()]
    for account in accounts:
        if account[0] == "root":
            account[field] = value
    path.write_text("".join(":".join(account) + "\n" for account in accounts))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
