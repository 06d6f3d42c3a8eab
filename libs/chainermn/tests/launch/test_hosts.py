"""Lists of hosts and hostfiles, in the notations of both MPIs."""

from __future__ import annotations

from pathlib import Path

import pytest

from chainermn.doctor.command import doctor
from chainermn.launch.command import launch
from chainermn.launch.hosts import (
    fill_hosts,
    parse_hosts,
    read_hostfile,
    show_by_host,
    show_hosts,
)

pytestmark = pytest.mark.each_mpi


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", [("a", 1)]),
        ("a:2,b:3", [("a", 2), ("b", 3)]),
        ("b,a", [("b", 1), ("a", 1)]),
        ("a,b,a:2", [("a", 3), ("b", 1)]),
        (
            "node-1.example.org:16,user@10.0.0.2",
            [("node-1.example.org", 16), ("user@10.0.0.2", 1)],
        ),
    ],
)
def test_list(text: str, hosts: list[tuple[str, int]]) -> None:
    assert parse_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", "a,,b", "a:", "a:many", "a:2:3", ":2", "a b"])
def test_wrong_list(text: str) -> None:
    with pytest.raises(ValueError, match="expected a host as in a:2 or 'a slots=2', got"):
        parse_hosts(text)


def test_hostfile(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(
        "# MPICH\n"
        "a:2\n"
        "\n"
        "   b:4 # the large one\n"
        "c slots=3\n"
        "d  slots=2 max_slots=8\n"
        "e max-slots=8\n"
        "a\n"
    )
    assert read_hostfile(path) == [("a", 3), ("b", 4), ("c", 3), ("d", 2), ("e", 1)]


def test_hostfile_of_chainermn_1(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("host00 cpu=4\nhost01 cpu=4 # the same\n\n# host02 cpu=4\nhost03 cpus=2\n")
    expected = [("host00", 4), ("host01", 4), ("host03", 2)]
    assert read_hostfile(path) == expected
    for command, arguments in ((launch, ["program"]), (doctor, [])):
        context = command.make_context("", ["--hostfile", str(path), *arguments])
        assert context.params["hostfile"] == expected


@pytest.mark.parametrize(
    "line",
    ["a slots=x", "a cpu=", "a cpu=2 slots=2", "a:2 slots=2", "a rank=1", "a slots=1 slots=2"],
)
def test_wrong_line_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(f"fine:2\n{line}\n")
    with pytest.raises(ValueError, match=rf"hosts, line 2: expected .*, got '{line}'"):
        read_hostfile(path)


def test_empty_hostfile(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# nobody\n")
    with pytest.raises(ValueError, match="hosts names no host"):
        read_hostfile(path)


@pytest.mark.parametrize(
    ("ranks", "filled"),
    [(1, [("a", 1)]), (2, [("a", 2)]), (3, [("a", 2), ("b", 1)]), (5, [("a", 2), ("b", 3)])],
)
def test_first_hosts_are_filled_first(ranks: int, filled: list[tuple[str, int]]) -> None:
    assert fill_hosts([("a", 2), ("b", 3)], ranks) == filled


def test_too_many_ranks() -> None:
    with pytest.raises(ValueError, match=r"6 ranks do not fit on the hosts a:2,b:3, which take 5"):
        fill_hosts([("a", 2), ("b", 3)], 6)


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        ([], ""),
        (["a"], "a"),
        (["a", "b"], "a, b"),
        (["host7"], "host7"),
        ([f"host{number:02}" for number in range(64)], "host[00-63]"),
        (["n8", "n9", "n10", "n11"], "n[8-11]"),
        (["n08", "n09", "n10", "n011"], "n[08-10,011]"),
        (["n1", "n2", "n4", "n3"], "n[1-2,4,3]"),
        (["n1.site", "gpu", "n2.site"], "n[1-2].site, gpu"),
        (["node", "node1", "node2"], "node, node[1-2]"),
        (["10.0.0.1", "10.0.0.2", "10.0.1.3"], "10.0.0.[1-2], 10.0.1.3"),
    ],
)
def test_hosts_in_brief(names: list[str], shown: str) -> None:
    assert show_hosts(names) == shown


def test_hosts_of_which_the_same_is_said() -> None:
    texts = {"a1": "up", "a2": "down", "a3": "up", "a4": "up"}
    assert show_by_host(texts) == "a[1,3-4]: up; a2: down"
    assert show_by_host({}) == ""
