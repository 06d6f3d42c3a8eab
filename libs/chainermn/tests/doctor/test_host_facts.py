"""What a host says about itself, and how it is asked."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import platform
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from chainermn.doctor import facts, host_facts, versions
from chainermn.doctor.setup import Setup
from chainermn.launch.mpiexec import find_mpiexec, mpiexec_version


def program(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_this_host(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("train")
    found = host_facts.collect(str(script), str(tmp_path), str(find_mpiexec()))
    assert found["host"] == socket.gethostname()
    assert found["python"] == platform.python_version()
    assert found["packages"]["numpy"] == metadata.version("numpy")
    assert found["packages"]["chainer-compat"] == metadata.version("chainer-compat")
    assert found["mpiexec"] in mpiexec_version(find_mpiexec())
    assert found["script"] == hashlib.sha256(b"train").hexdigest()[:12]
    assert found["data"].startswith("1 entries (")
    assert 1 <= found["cores"] <= (os.cpu_count() or 1)


def test_it_runs_without_chainermn(tmp_path: Path) -> None:
    arguments = {"script": None, "data": str(tmp_path), "mpiexec": None}
    shown = subprocess.run(
        [sys.executable, "-I", "-", json.dumps(arguments)],
        input=Path(host_facts.__file__).read_text(),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    said = json.loads(shown.stdout)
    assert {name: said[name] for name in ("host", "data", "mpiexec")} == {
        "host": socket.gethostname(),
        "data": host_facts.contents(str(tmp_path)),
        "mpiexec": None,
    }


@pytest.mark.parametrize(
    ("script", "version"),
    [
        ("echo 'mpiexec (OpenRTE) 5.0.11'", "5.0.11"),
        ("echo HYDRA; echo '    Version:  4.3.0rc2 of today' >&2", "4.3.0rc2"),
        ("echo of somebody", None),
    ],
)
def test_version_that_mpiexec_prints(script: str, version: str | None, tmp_path: Path) -> None:
    path = program(tmp_path / "mpiexec", script)
    assert host_facts.version_of(str(path)) == version


def test_what_is_not_there() -> None:
    for nothing in (None, "/nowhere/at/all"):
        assert host_facts.version_of(nothing) is None
        assert host_facts.digest(nothing) is None
        assert host_facts.contents(nothing) is None


def test_data(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    file = tmp_path / "labels.txt"
    file.write_text("12345")
    assert host_facts.contents(str(file)) == "a file of 5 bytes"
    both = host_facts.contents(str(tmp_path))
    assert both is not None
    assert both.startswith("2 entries (")
    (tmp_path / "images" / "1.png").touch()
    assert host_facts.contents(str(tmp_path)) == both  # it looks into no folder
    file.rename(tmp_path / "labels.csv")
    assert host_facts.contents(str(tmp_path)) not in (both, None)


def test_addresses_are_those_that_psutil_finds() -> None:
    stats = psutil.net_if_stats()
    expected = {
        name: str(ipaddress.ip_interface(f"{address.address}/{address.netmask}"))
        for name, addresses in psutil.net_if_addrs().items()
        for address in reversed(addresses)  # the first counts
        if address.family == socket.AF_INET
        and stats[name].isup
        and "loopback" not in stats[name].flags.split(",")
    }
    assert host_facts.addresses() == expected


def test_gpus_that_nvidia_smi_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert host_facts.gpus() == 0
    program(
        tmp_path / "nvidia-smi",
        '[ "$1" = -L ] && echo "GPU 0: H200" && echo "  MIG 1g.18gb" && echo "GPU 1: H200"',
    )
    assert host_facts.gpus() == 2


# ---- how hosts are asked ----


def test_host_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "ssh", "exec sleep 600")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(facts, "_LIMIT", 0.2)
    answers = facts.ask_hosts(["elsewhere", "far"], None, None)
    assert answers == dict.fromkeys(
        ("elsewhere", "far"), facts.Answer(no_way_in="no answer within 0.2 s")
    )


def test_hosts_are_asked_even_without_an_mpiexec_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise FileNotFoundError

    monkeypatch.setattr(facts, "find_mpiexec", none)
    answer = facts.ask_hosts([socket.gethostname()], Path(__file__), None)[socket.gethostname()]
    assert (answer.no_way_in, answer.no_python) == ("", "")
    assert answer.facts["mpiexec"] is None
    assert answer.facts["script"] == host_facts.digest(__file__)


def test_job_that_cannot_be_started() -> None:
    setup = Setup(hosts=[("a", 1)])
    outcome = setup.probe_ranks("ranks", 3, setup.hosts)
    assert outcome.answers == []
    assert "3 ranks do not fit on the hosts a:1" in outcome.failure


def test_tour_visits_every_rank_on_all_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(Setup, "probe_ranks", lambda self, *what: asked.append(what))
    assert Setup(hosts=[("a", 2), ("b", 3)]).tour is None
    assert Setup().tour is None
    assert asked == [("surroundings", 5, [("a", 2), ("b", 3)]), ("surroundings", 0, [])]


def test_versions_where_much_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_file() -> dict[str, str]:
        raise FileNotFoundError

    def no_package(name: str) -> str:
        raise metadata.PackageNotFoundError

    def no_library() -> str:
        raise RuntimeError("mpi4py cannot load an MPI library")

    monkeypatch.setattr(versions.platform, "freedesktop_os_release", no_file)
    monkeypatch.setattr(
        versions,
        "metadata",
        SimpleNamespace(
            version=no_package,
            packages_distributions=lambda: {"cupy": ["cupy-cuda13x"]},
            PackageNotFoundError=metadata.PackageNotFoundError,
        ),
    )
    monkeypatch.setattr(versions, "mpi4py_library", no_library)
    said = versions.collect(Setup())
    assert said["system"].startswith(f"{platform.system()}, kernel {platform.release()}, ")
    assert said["chainer"] == said["cupy-cuda13x"] == "not installed"
    assert said["MPI"] == "mpi4py cannot load an MPI library"
