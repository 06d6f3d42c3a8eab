"""Processes that help a rank, wherever they start and however they end."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from chainermn.process.helper import HelperError, end_of, start_helper
from libs.chainermn.tests.process.hidden_modules import hide_all_modules

TIMEOUT = 60


def test_helper_imports_nothing_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(hide_all_modules(tmp_path))
    monkeypatch.setenv("PYTHONPATH", ":")
    name = f"\0{tmp_path}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(name)
        listener.listen()
        arguments = {"listener": listener.fileno(), "numbers": (0, 2, 2), "limit": 0}
        guard = start_helper("chainermn.failures.guard", arguments, [listener.fileno()])
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(name)  # the guard runs as long as a rank is connected
    assert end_of(guard, TIMEOUT) == "ended with exit code 0"


def test_helper_that_fails_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    helper = start_helper("chainermn.process.patience", {})
    assert end_of(helper, TIMEOUT) == "ended with exit code 1"
    said = capfd.readouterr().err
    assert said.startswith("chainermn: chainermn-patience failed: AttributeError: ")
    assert said.count("\n") == 1


def test_helper_of_a_rank_without_standard_error_prints_into_no_file(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "__stderr__", None)  # what Python does if it is closed
    helper = start_helper("chainermn.process.patience", {})
    assert end_of(helper, TIMEOUT) == "ended with exit code 1"
    assert capfd.readouterr().err == ""


def test_helper_that_is_killed() -> None:
    helper = subprocess.Popen(["sleep", "1000"])
    assert end_of(helper) == ""
    helper.kill()
    assert end_of(helper, TIMEOUT) == "been killed by SIGKILL"


@pytest.mark.parametrize("is_there_soon", [False, True])
def test_start_is_tried_a_few_times(
    is_there_soon: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(python))
    attempts: list[Path] = []

    def start(*arguments: object, **options: object) -> subprocess.Popen[bytes]:
        attempts.append(python)
        if is_there_soon and len(attempts) == 2:
            python.symlink_to("/bin/true")
        return popen(*arguments, **options)

    popen: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", start)
    if is_there_soon:
        helper = start_helper("chainermn.failures.guard", {})
        assert end_of(helper, TIMEOUT) == "ended with exit code 0"
    else:
        with pytest.raises(HelperError, match="cannot start chainermn-guard: No such file or dir"):
            start_helper("chainermn.failures.guard", {})
    assert len(attempts) == (2 if is_there_soon else 3)
