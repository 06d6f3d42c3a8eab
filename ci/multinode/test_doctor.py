"""``chainermn doctor`` and ``chainermn launch`` on several hosts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from chainermn.doctor.checks import CHECKS
from chainermn.doctor.registry import Status
from chainermn.doctor.setup import Setup
from chainermn.launch.mpiexec import mpi_flavor
from ci.multinode.hosts import Hosts

MNIST = Path(__file__).parents[2] / "apps/mnist"
BY_NAME = {check.name: check for check in CHECKS}


def chainermn(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        [sys.executable, "-m", "chainermn", *arguments],
        env={**os.environ, "PATH": path, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.fixture
def other_numpy(hosts: Hosts, local_path: Path) -> Iterator[str]:
    """Make the second host believe that it has another NumPy; return the version."""
    if not hosts.emulated:
        pytest.skip("tests leave the packages of real machines alone")
    second = hosts.names[1]
    here = metadata.distribution("numpy").locate_file(
        f"numpy-{metadata.version('numpy')}.dist-info"
    )
    there = local_path / "METADATA"
    changed = re.sub(
        r"(?m)^Version: .*", "Version: 2.0.0", Path(str(here), "METADATA").read_text()
    )
    write = f"import pathlib; pathlib.Path({str(there)!r}).write_text({changed[:200]!r})"
    hosts.check(second, sys.executable, "-c", write)
    hosts.check(second, "mount", "--bind", str(there), f"{here}/METADATA")
    yield "2.0.0"
    hosts.check(second, "umount", f"{here}/METADATA")


def test_hosts_are_fine(hosts: Hosts) -> None:
    first, second = hosts.names[:2]
    needed = ["--script", str(MNIST / "train.py"), "--data", str(MNIST), "--parameters", "25.6e6"]
    shown = chainermn("doctor", "--json", "--host", f"{first}:1,{second}:1", *needed)
    rows = {row["name"]: row for row in json.loads(shown.stdout)["checks"]}
    for name, check in BY_NAME.items():
        # Nobody can tell which of two hosts is slow.
        if (check.subject == "hosts" and name != "slow hosts") or name == "files":
            assert rows[name]["status"] == "good", rows[name]
    # The network's speed depends on what else the machine does.
    advice = r"on CPU, use create_communicator\('\w+'(, allreduce_grad_dtype='bfloat16')?\)"
    assert re.match(advice, rows["network"]["found"])
    gradients = r"25\.6 million gradients take about .* s with float32, .*PowerSGD\(rank=4\)\. "
    assert re.match(gradients, rows["gradients of the model"]["found"])


def test_hosts_differ(
    hosts: Hosts, local_path: Path, other_numpy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = hosts.names[:2]
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    script = local_path / "train.py"
    hosts.check(first, "touch", str(script))
    setup = Setup(hosts=[(first, 1), (second, 1)], script=script, data=local_path)
    expected = {
        "same software": f"numpy: {first}: {metadata.version('numpy')}; {second}: {other_numpy}",
        "files": f"{second}: {script}: missing",
    }
    if mpi_flavor() == "openmpi":  # MPICH forwards all variables
        expected["environment"] = f"NCCL_DEBUG is not the same on {second}"
    for name, found in expected.items():
        finding = BY_NAME[name].examine(setup)
        assert finding.status is Status.BAD, (name, finding)
        assert found in finding.found
        assert finding.remedy


def test_named_variable_is_forwarded(hosts: Hosts, local_path: Path) -> None:
    where = ",".join(f"{name}:1" for name in hosts.names[:2])
    touch = f"import os; open(os.path.join({str(local_path)!r}, os.environ['COLOR']), 'w')"
    program = [sys.executable, "-c", touch]
    shown = chainermn("launch", "--host", where, "--forward", "COLOR", *program, COLOR="green")
    assert shown.returncode == 0, shown
    for name in hosts.names[:2]:
        assert hosts.check(name, "ls", str(local_path)) == "green\n"
