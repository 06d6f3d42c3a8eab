"""What a host says about itself, and how it is asked."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from chainermn.doctor import host_facts, report, setup
from chainermn.doctor.probe import TAKING_TURNS, Outcome
from chainermn.doctor.setup import Answer, Setup
from chainermn.launch.mpiexec import find_mpiexec, mpiexec_version
from libs.chainermn.tests.process.hidden_modules import hide_all_modules


def program(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_this_host(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("train")
    found = host_facts.collect([str(script), str(tmp_path)], str(find_mpiexec()))
    assert found["host"] == socket.gethostname()
    assert found["software"]["Python"] == platform.python_version()
    assert found["software"]["numpy"] == metadata.version("numpy")
    assert found["software"]["chainer-compat"] == metadata.version("chainer-compat")
    assert found["software"]["mpiexec"] in mpiexec_version(find_mpiexec())
    assert found["files"][str(script)].startswith("5 bytes (sha256 ")
    assert found["files"][str(tmp_path)].startswith("1 entries (sha256 ")
    assert 1 <= found["cores"] <= (os.cpu_count() or 1)
    assert found["machine"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def test_it_runs_without_chainermn(tmp_path: Path) -> None:
    arguments = {"paths": [str(tmp_path)], "mpiexec": None}
    shown = subprocess.run(
        [sys.executable, "-I", "-", json.dumps(arguments)],
        input=Path(host_facts.__file__).read_text(),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    said = json.loads(shown.stdout)
    assert said["host"] == socket.gethostname()
    assert said["files"] == {str(tmp_path): host_facts.contents(str(tmp_path))}
    assert said["software"]["mpiexec"] == "none"


def test_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for path, text in {
        "first/nvidia_nccl_cu12-2.27.3.dist-info/METADATA": "Version: 2.27.3\n\nVersion: 0",
        "first/chainer_compat-8.0.0.dist-info/METADATA": "Metadata-Version: 2.1\nVersion: 8.0.0",
        "first/mpich_else-1.dist-info/METADATA": "Version: 1",
        "second/chainer.egg-info/PKG-INFO": "Version: 7.8.1",
        "second/chainer_compat-7.dist-info/METADATA": "Version: 7",
        "second/numpy-1.24.2.egg-info": "Version: 1.24.2",
        "second/cupy_cuda12x-13.dist-info/RECORD": "",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.setattr(sys, "path", ["/nowhere", str(first), str(second)])
    assert host_facts.packages() == {
        "chainer": "7.8.1",
        "chainer-compat": "8.0.0",  # the first one is imported
        "cupy-cuda12x": "unknown",
        "numpy": "1.24.2",
        "nvidia-nccl-cu12": "2.27.3",
    }


@pytest.mark.parametrize(
    ("script", "version"),
    [
        ("echo 'mpiexec (OpenRTE) 5.0.11'", "5.0.11"),
        ("echo HYDRA; echo '    Version:  4.3.0rc2 from today' >&2", "4.3.0rc2"),
        ("echo of somebody", "none"),
    ],
)
def test_version_that_mpiexec_prints(script: str, version: str, tmp_path: Path) -> None:
    path = program(tmp_path / "mpiexec", script)
    assert host_facts.version_of(str(path)) == version


def test_what_is_not_there() -> None:
    assert host_facts.version_of(None) == host_facts.version_of("/nowhere/at/all") == "none"
    assert host_facts.contents("/nowhere/at/all") == "missing"


def test_contents(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    file = tmp_path / "labels.txt"
    file.write_text("12345")
    digest = hashlib.sha256(b"12345").hexdigest()[:12]
    assert host_facts.contents(str(file)) == f"5 bytes (sha256 {digest}...)"
    both = host_facts.contents(str(tmp_path))
    assert both.startswith("2 entries (")
    (tmp_path / "images" / "1.png").touch()
    assert host_facts.contents(str(tmp_path)) == both  # it does not look into folders
    file.rename(tmp_path / "labels.csv")
    assert host_facts.contents(str(tmp_path)) not in (both, "missing")


def test_gpus_that_nvidia_smi_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert host_facts.gpus() == 0
    program(
        tmp_path / "nvidia-smi",
        '[ "$1" = -L ] && echo "GPU 0: H200" && echo "  MIG 1g.18gb" && echo "GPU 1: H200"',
    )
    assert host_facts.gpus() == 2
    program(tmp_path / "nvidia-smi", "exec /bin/sleep 600")
    assert host_facts.gpus(seconds=0.1) is None


# ---- how hosts are asked ----


def test_host_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "ssh", "exec sleep 600")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    silent = Answer(unreachable="no answer within 0.2 s")
    assert Setup(hosts=[("elsewhere", 1), ("far", 1)], limit=0.2).facts == {
        "elsewhere": silent,
        "far": silent,
    }


def test_hosts_are_asked_even_without_an_mpiexec_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(hide_all_modules(tmp_path))  # which must not matter

    def none() -> Path:
        raise FileNotFoundError

    monkeypatch.setattr(setup, "find_mpiexec", none)
    answer = Setup(script=Path(__file__)).facts[socket.gethostname()]
    assert (answer.unreachable, answer.no_python) == ("", "")
    assert answer.facts["software"]["mpiexec"] == "none"
    assert answer.facts["files"] == {__file__: host_facts.contents(__file__)}


def test_job_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*arguments: object, **options: object) -> list[str]:
        raise FileNotFoundError("no mpiexec")

    monkeypatch.setattr(setup, "mpiexec_command", none)
    assert Setup(hosts=[("a", 1)]).probe_hosts("ranks") == Outcome(failure="no mpiexec")
    monkeypatch.setattr(setup, "mpiexec_command", lambda *job, **options: ["/nowhere/mpiexec"])
    assert "/nowhere/mpiexec" in Setup().probe("ranks", 2).failure


def test_probes_run_on_every_rank_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[object]] = []

    def command(ranks: int, program: list[str], **options: object) -> list[str]:
        asked.append([ranks, options["hosts"]])
        return program

    def ask(command: list[str], names: list[str], *how: object) -> dict[str, Outcome]:
        asked[-1] += names
        return {name: Outcome(f"{name} {len(asked)}") for name in names}

    monkeypatch.setattr(setup, "mpiexec_command", command)
    monkeypatch.setattr(setup, "ask", ask)
    monkeypatch.setattr(Setup, "facts", {"a": Answer(), "b": Answer()})
    hosts = [("a", 2), ("b", 3)]
    both = Setup(hosts=hosts)
    assert [both.probe_hosts("ranks").answer for _ in range(2)] == ["ranks 1"] * 2
    assert both.probe_hosts("exchange").answer == "exchange 1"
    assert [both.probe("ranks", 4).answer for _ in range(2)] == ["ranks 2"] * 2
    assert Setup(hosts=hosts, parameters=1e6).probe_hosts("settings").answer == "settings 3"
    assert Setup(hosts=hosts[:1]).probe_hosts("ranks").answer == "ranks 4"
    of_all = ("ranks", "speeds", "communicators", "exchange")
    assert asked == [
        [5, hosts, *of_all],
        [4, None, "ranks"],
        [5, hosts, *of_all, "settings"],
        [2, hosts[:1], "ranks", "communicators"],
    ]


def test_system_that_binds_no_process_to_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where processes cannot be bound to cores, as on macOS, all cores count."""
    monkeypatch.delattr(os, "sched_getaffinity")
    assert host_facts.cores() == os.cpu_count()


@pytest.mark.parametrize(
    ("machines", "cores", "ranks", "takes_turns"),
    [
        ("abc", [2, 2, 2], [2, 2, 2], False),
        ("abc", [2, 2, 2], [2, 3, 2], True),
        ("aab", [4, 2, 2], [2, 2, 2], False),
        ("aab", [4, 2, 2], [2, 3, 2], True),
    ],
)
def test_ranks_that_share_cores_take_turns(
    machines: str,
    cores: list[int],
    ranks: list[int],
    takes_turns: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Containers on one machine have different names but share its cores."""
    monkeypatch.delenv(*TAKING_TURNS, raising=False)
    told: list[bool] = []

    def ask(
        command: object, names: list[str], limit: float, environment: dict[str, str]
    ) -> dict[str, Outcome]:
        told.append(environment.items() >= TAKING_TURNS.items())
        return dict.fromkeys(names, Outcome())

    monkeypatch.setattr(setup, "ask", ask)
    hosts = [(f"host{place}", number) for place, number in enumerate(ranks)]
    examined = Setup(hosts=hosts)
    examined.facts = {
        name: Answer({"machine": machine, "cores": number})
        for (name, _), machine, number in zip(hosts, machines, cores, strict=True)
    }
    examined.probe_hosts("ranks")
    assert told == [takes_turns]


def test_versions_where_there_is_no_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library() -> str:
        raise RuntimeError("mpi4py cannot load an MPI library")

    monkeypatch.setattr(report, "mpi4py_library", no_library)
    said = report.versions()
    assert said["system"] == platform.platform()
    assert said["chainer"] == "7.8.1"
    assert said["MPI"] == "mpi4py cannot load an MPI library"
