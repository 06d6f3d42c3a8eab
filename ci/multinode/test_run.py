"""`chainermn.launch.run` with hosts: a function of this module, which no rank can import."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from chainermn.launch import run
from chainermn.launch.mpiexec import mpi_flavor
from ci.multinode.hosts import Hosts

MARKED = Path(__file__).with_name("marked.py")


class Refused(Exception):
    """Raised on one rank."""


@pytest.fixture(autouse=True)
def leaves_nothing_of_the_call(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail if a process of the ranks is left on any host."""
    # Both MPIs pass on variables with this prefix.
    name, value = "CHAINERMN_TEST", uuid.uuid4().hex
    monkeypatch.setenv(name, value)
    yield
    monkeypatch.delenv(name)
    deadline = time.monotonic() + 30
    while left := _left(hosts, name, value):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def _left(hosts: Hosts, name: str, value: str) -> list[object]:
    answers = hosts.check_all(sys.executable, str(MARKED), name, value)
    return [process for answer in answers.values() for process in json.loads(answer)]


def place_and_sum(number: int) -> tuple[str, int]:
    import chainermn

    comm = chainermn.create_communicator()
    print("prints on", socket.gethostname())
    return socket.gethostname(), comm.allreduce_obj(number + comm.rank)


def test_results_and_output_of_two_hosts(
    hosts: Hosts, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    first, second = hosts.names[:2]
    places = [(first, 2), (second, 1)]
    assert run(place_and_sum, 5, ranks=3, hosts=places) == [(first, 18)] * 2 + [(second, 18)]
    lines = [line for line in capsys.readouterr().out.splitlines() if "prints on" in line]
    expected = enumerate([first, first, second])
    assert sorted(lines) == [f"[rank {rank}] prints on {name}" for rank, name in expected]


def test_folder_that_one_host_lacks(
    hosts: Hosts, local_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = hosts.names[:2]
    where = f"{first},{second}"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder = local_path / "only_here"
    folder.mkdir()
    with contextlib.chdir(folder):
        if mpi_flavor() == "mpich":
            with pytest.raises(ConnectionError, match=f"{second}: it has no {folder}"):
                run(place_and_sum, 5, ranks=2, hosts=where)
        else:  # it starts in the home folder
            assert run(place_and_sum, 5, ranks=2, hosts=where)[1] == (second, 11)


def raise_on_the_last() -> None:
    import chainermn

    comm = chainermn.create_communicator()
    if comm.rank == comm.size - 1:
        raise Refused(socket.gethostname())
    comm.recv_obj(source=comm.size - 1)


def test_exception_of_another_host(hosts: Hosts) -> None:
    first, second = hosts.names[:2]
    with pytest.raises(Refused, match=second) as raised:
        run(raise_on_the_last, ranks=2, hosts=f"{first},{second}")
    assert "rank 1" in raised.value.__notes__[0]
