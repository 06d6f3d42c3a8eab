"""Lists of hosts and hostfiles, in the notations of both MPIs."""

from __future__ import annotations

import itertools
import re
import string
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chainermn.doctor.command import doctor
from chainermn.launch import run
from chainermn.launch.command import launch
from chainermn.launch.hosts import (
    fill_hosts,
    parse_hosts,
    parse_lines,
    printable,
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


@pytest.mark.parametrize("text", ["", "a,,b", "a:", "a:many", "a:2:3", ":2", "a b", "::1"])
def test_wrong_list(text: str) -> None:
    with pytest.raises(ValueError, match="expected a host such as a:2 or 'a slots=2', got"):
        parse_hosts(text)


# Names that ssh, srun, scontrol or mpiexec could take for an option, a pattern or shell syntax.
NO_NAMES = [
    *("-oProxyCommand=touch", "-", "--", "-x", ".a", "@a", "a@-b", "-a@b", "a@b@c", "a/b", "a;b"),
    *("$(id)", "`id`", "a|b", "'a'", "a\\b", "n[1-3]", "+n1", "a*", "a=b", "%h", "~", "[a]"),
    *("\x1b[31m", "a\0", "\u202ea", "\u0430", "\u0664", "a" * 256),
]


@pytest.mark.parametrize("name", NO_NAMES)
def test_what_no_host_is_called(name: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(f"fine:2\n{name}\n")
    reading: dict[str, Callable[[], object]] = {
        "": lambda: parse_hosts(f"fine:2,{name}"),
        f"{path}, line 2: ": lambda: read_hostfile(path),
        "run: hosts must look like .*: ": lambda: run(print, hosts=[("fine", 2), (name, 1)]),
    }
    for begin, read in reading.items():
        with pytest.raises(
            ValueError, match=f"^{begin}expected a host name made of let"
        ) as raised:
            read()
        assert str(raised.value).isprintable()
    for command in (launch, doctor):
        for options in (["--host", f"fine,{name}"], ["--hostfile", str(path)]):
            context = ["-n", "1", *options] + (["hostname"] if command is launch else [])
            with pytest.raises(click.BadParameter, match="expected a host name made of letters"):
                command.make_context("", context)


def test_options_that_are_empty_are_left_out() -> None:
    for command, options in ((launch, ["hostname"]), (doctor, ["--script", "", "--data", ""])):
        context = command.make_context("", ["-n", "1", "--hostfile", "", *options])
        assert context.params["hostfile"] is None
    assert (context.params["script"], context.params["data"]) == (None, None)


@given(st.text() | st.from_regex(r"[-\w.@:,]*", fullmatch=True))
def test_of_any_text_come_names_or_a_clear_error(text: str) -> None:
    try:
        found = parse_hosts(text)
    except ValueError as error:
        assert str(error).startswith("expected ")
        assert str(error).isprintable()
    else:
        for name, places in found:
            assert {*name} <= {*string.ascii_letters, *string.digits, *".-_@"}
            assert name[0] not in ".-@"
            assert 1 <= places <= 999_999


@pytest.mark.parametrize("places", ["0", "000", "1000000", "99999999999", "9" * 4000])
def test_number_that_no_host_takes(places: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    for entry in (f"a:{places}", f"a slots={places}"):
        path.write_text(f"fine:2\n{entry}\n")
        expected = f"{path}, line 2: expected 1 to 999,999 ranks on a host, got {entry[:80]!r}"
        with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
            read_hostfile(path)


def test_hosts_take_no_more_than_mpi_counts() -> None:
    with pytest.raises(ValueError, match=r"^expected at most 999,999 ranks .*, got 1,000,000$"):
        parse_hosts("a:999999,b:000001")


def test_file_that_is_no_hostfile(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    for content, message in {
        b"fine # caf\xe9\n\x7fELF\xff\0": r"2: expected a host name made of .*, got '\\x7fELF",
        b"fine\n" + b"a" * 5000: "2: expected at most 4,096 bytes per line",
    }.items():
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"^{path}, line {message}"):
            read_hostfile(path)
    with pytest.raises(ValueError, match=r"^/dev/zero, line 1: expected at most 4,096 bytes"):
        read_hostfile("/dev/zero")
    too_many = itertools.repeat(b"\n", 1_000_001)
    with pytest.raises(ValueError, match=r"^a pipe, line 1000001: .* 1,000,000 lines$"):
        parse_lines(too_many, "a pipe")


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


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbfa:2\nb slots=3\n",
        b"a slots = 2\nb cpu= 3 max_slots =4\n",
        b"a\tslots\t=\t2 # two\r\nb\tslots=3\r\n\r\n",
        b"\xef\xbb\xbf# of Windows\r\n\ta:2\t\r\nb slots =3",
    ],
)
def test_hostfile_of_any_editor(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_bytes(content)
    assert read_hostfile(path) == [("a", 2), ("b", 3)]


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


def test_control_characters_are_shown() -> None:
    text = "caf\xe9 \u4e2d\n\x1b[2J\r\x9b\x7f\u202e\udcff"
    assert printable(text) == "caf\xe9 \u4e2d\n" + r"\x1b[2J\r\x9b\x7f\u202e\udcff"
