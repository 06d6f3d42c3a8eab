"""Which hosts are chosen, which are left out for how long, and when waiting ends."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
import pytest

from chainermn.launch.hosts import Host
from chainermn.launch.membership import DiscoveryError, Membership, discover_by

HOSTS = [("a", 2), ("b", 2), ("c", 2)]


class World:
    """Hosts that come and go, and a clock that advances with each pause."""

    def __init__(self, hosts: list[Host] | None = None) -> None:
        self.hosts = HOSTS if hosts is None else hosts
        self.unusable: dict[str, str] = {}
        self.now = 100.0
        self.pauses: list[float] = []
        #: Attributes to change, by the number of pauses until then.
        self.news: dict[int, dict[str, Any]] = {}
        self.error = ""

    def discover(self) -> list[Host]:
        if self.error:
            raise DiscoveryError(self.error)
        return self.hosts

    def find_unusable(self, names: Any) -> dict[str, str]:
        return {name: why for name, why in self.unusable.items() if name in names}

    def pause(self, seconds: float) -> bool:
        self.now += seconds
        self.pauses.append(seconds)
        vars(self).update(self.news.get(len(self.pauses), {}))
        return True

    def membership(self, **options: Any) -> Membership:
        settings = {"min_ranks": 1, "max_ranks": None, "patience": 60.0, "pause": self.pause}
        return Membership(
            self.discover,
            self.find_unusable,
            clock=lambda: self.now,
            **{**settings, **options},  # type: ignore[arg-type]
        )


def test_all_that_can_be_used() -> None:
    world = World()
    membership = world.membership(min_ranks=4)
    assert membership.choose() == HOSTS
    world.unusable = {"b": "gone"}
    assert membership.choose() == [("a", 2), ("c", 2)]
    assert membership.left_out == {"b": "gone"}
    world.hosts, world.unusable = [("a", 1), ("new", 5)], {}
    assert membership.choose() == [("a", 1), ("new", 5)]
    assert membership.left_out == {}


@pytest.mark.parametrize(
    ("most", "expected"),
    [(1, [("a", 1)]), (3, [("a", 2), ("b", 1)]), (6, HOSTS), (9, HOSTS)],
)
def test_most_ranks(most: int, expected: list[Host]) -> None:
    assert World().membership(max_ranks=most).choose() == expected


def test_waiting_until_enough_have_come(capsys: pytest.CaptureFixture[str]) -> None:
    world = World([("a", 1)])
    world.news = {2: {"error": "script: broken"}, 3: {"error": ""}, 5: {"hosts": HOSTS}}
    assert world.membership(min_ranks=2).choose() == HOSTS
    assert world.pauses == [1, 2, 4, 8, 10]
    lack = "at least 2 ranks are needed, but a:1 take 1"
    assert capsys.readouterr().err.splitlines() == [
        f"chainermn launch: {said}; waiting up to 60 s" for said in (lack, "script: broken", lack)
    ]


@pytest.mark.parametrize(("patience", "pauses"), [(0, []), (5, [1, 2, 4]), (0.5, [0.5])])
def test_waiting_ends(patience: float, pauses: list[float]) -> None:
    world = World([])
    expected = r"^at least 1 ranks are needed, but there is no usable host; gave up after \d+ s"
    with pytest.raises(click.ClickException, match=expected):
        world.membership(patience=patience).choose()
    assert world.pauses == pauses


def test_signal_ends_waiting() -> None:
    assert World([]).membership(pause=lambda seconds: False).choose() is None


def test_host_that_keeps_failing_is_left_out_for_longer_and_longer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    world = World()
    membership = world.membership(min_ranks=2)
    membership.note_failure("abc", "b", 5)
    assert membership.choose() == HOSTS
    for seconds in (30, 60, 120):
        membership.note_failure("abc", "b", 5)
        assert membership.choose() == [("a", 2), ("c", 2)]
        world.now += seconds - 1
        assert membership.choose() == [("a", 2), ("c", 2)]
        (why,) = membership.left_out.values()
        assert why.endswith("left out for 1 s")
        world.now += 1
        assert membership.choose() == HOSTS
    said = "chainermn launch: b failed 2 times in a row; leaving it out for 30 s"
    assert capsys.readouterr().err.splitlines()[0] == said
    # A failure after a long run is not in a row with earlier ones.
    membership.note_failure("abc", "b", 10_000)
    assert membership.choose() == HOSTS


def test_failures_between_which_others_failed_are_not_in_a_row() -> None:
    world = World()
    membership = world.membership()
    membership.note_failure("abc", "b", 5)
    membership.note_failure("abc", "c", 5)
    membership.note_failure("abc", "", 5)
    membership.note_failure("abc", "bc", 5)
    assert membership.choose() == HOSTS
    # An attempt without a host says nothing about it.
    membership.note_failure("ac", "", 5)
    membership.note_failure("abc", "bc", 5)
    assert membership.choose() == [("a", 2), ("c", 2)]


def test_failing_host_is_waited_for_if_there_are_no_others() -> None:
    world = World([("a", 2)])
    membership = world.membership()
    membership.note_failure("a", "a", 5)
    membership.note_failure("a", "a", 5)
    assert membership.choose() == [("a", 2)]
    assert sum(world.pauses) >= 30


def script(folder: Path, *lines: str) -> list[str]:
    path = folder / "discover.py"
    path.write_text("\n".join(["import sys", *lines]))
    return [sys.executable, str(path)]


def test_script_names_hosts(tmp_path: Path) -> None:
    command = script(tmp_path, 'print("a:2", "b slots=3", "", "c  # new", "a", sep="\\n")')
    assert discover_by(command)() == [("a", 3), ("b", 3), ("c", 1)]
    assert discover_by(script(tmp_path, ""))() == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("sys.exit(3)", "ended with exit code 3"),
        ('print("a:x")', "line 1: expected a host such as a:2"),
        ('print("a\\n-oProxyCommand=x")', "line 2: expected a host name made of letters"),
        (r'sys.stdout.buffer.write(b"\xff\0")', r"line 1: .*, got '\\\\xff\\x00'"),
    ],
)
def test_script_that_fails(line: str, expected: str, tmp_path: Path) -> None:
    with pytest.raises(DiscoveryError, match=f"discover.py.*{expected}"):
        discover_by(script(tmp_path, line))()


def test_script_that_cannot_be_started(tmp_path: Path) -> None:
    with pytest.raises(DiscoveryError, match="nothing"):
        discover_by([str(tmp_path / "nothing")])()
