"""The walk-through of two machines: its commands work, from installing to resuming."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from chainermn.testing.mpiexec import mpi_flavor
from ci.multinode.hosts import Hosts
from ci.multinode.jobs import Job

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/walkthroughs/two_machines.md"


def commands(names: list[str], home: Path) -> str:
    """Return the commands of the page for these hosts, with ``home`` as the home folder there."""
    blocks = re.findall(r"<!-- run: two hosts -->\n```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    text = "".join(blocks)
    for address, name in zip(("10.0.0.1", "10.0.0.2"), names, strict=False):
        text = re.sub(
            rf"{re.escape(address)}([: ])chainermn/", rf"{name}\1{home}/chainermn/", text
        )
        text = text.replace(address, name)
    if not shutil.which("rsync"):
        copy = f"tar -C {home} -cf - chainermn | ssh {names[1]} tar -C {home} -xf -"
        text = re.sub("^rsync .*", copy, text, flags=re.MULTILINE)
    return text


def test_two_machines_that_share_nothing(
    start_command: Callable[..., Job], hosts: Hosts, local_path: Path
) -> None:
    if mpi_flavor() != "mpich":
        pytest.skip("the page installs MPICH")
    installed = local_path / "chainermn"
    shutil.copytree(ROOT / "apps/mnist", installed / "apps/mnist")
    (installed / ".venv").symlink_to(sys.prefix)
    assert hosts.check(hosts.names[1], "ls", str(local_path)) == ""

    script = commands(hosts.names[:2], local_path)
    job = start_command(["bash", "-ec", script], env={"HOME": str(local_path)}).wait()
    assert job.returncode == 0, f"{job}"
    assert "✗" not in job.stdout
    assert job.stdout.count("ranks: 4, hosts: 2, ") == 2
    assert "\nbest.npz\n" in job.stdout
    assert "resuming after iteration 60, epoch 5, from both/snapshot_iter_60.0\n" in job.stdout
    # Only rank 0 writes.
    assert hosts.check(hosts.names[1], "ls", "-A", str(installed / "both")) == ""
