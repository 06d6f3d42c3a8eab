"""What ``python ci/cluster`` says where no hosts are up; ci/cluster/test_hosts.py starts some."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator

import pytest

from ci.cluster import requirements
from ci.cluster.__main__ import main
from ci.cluster.cluster import Cluster


@pytest.fixture
def signals() -> Iterator[None]:
    """Restore what signals do after the test."""
    numbers = signal.SIGTERM, signal.SIGHUP
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["up", "0"], "cluster: expected 1 to 99 hosts, got 0"),
        (["up", "many"], "invalid int value: 'many'"),
        (["exec", "host00", "true"], "is up; 'up 2' starts two"),
        (["rate", "1gbit"], "is up; 'up 2' starts two"),
        (["processes"], "is up; 'up 2' starts two"),
        (["link", "host00", "sideways"], "invalid choice: 'sideways'"),
        (["exec", "host00"], "the following arguments are required: CMD"),
        ([], "the following arguments are required: COMMAND"),
        (["reboot"], "invalid choice: 'reboot'"),
    ],
)
def test_wrong_use(
    arguments: list[str],
    message: str,
    signals: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["cluster", "--name", "test-wrong-use", *arguments])
    with pytest.raises(SystemExit) as ended:
        sys.exit(main())
    output, error = capsys.readouterr()
    assert (ended.value.code, output) == (2, "")
    assert message in error.splitlines()[-1]


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    present = ("unshare", "nsenter", "setpriv", "mount", "hostname", "ssh", "ssh-keygen")
    monkeypatch.setattr(shutil, "which", lambda name, path: name if name in present else None)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    remedy = "apt install iproute2 openssh-server"
    missing = requirements.find_missing()
    assert missing == f"this needs root, try sudo; no ip, sshd, tc here: {remedy}"
    with pytest.raises(RuntimeError, match=remedy):
        Cluster("test-missing").up(2)


def test_other_systems_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert requirements.find_missing().endswith("this is darwin")
