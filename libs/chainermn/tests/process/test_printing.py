"""Standard output whose encoding lacks characters."""

from __future__ import annotations

import io
import sys
from typing import Any

import click
import pytest

import chainermn
from chainermn.__main__ import main
from chainermn.process.streams import prepare_streams

TEXT = "Bär → \udce4 ✓"
ESCAPED = rb"B\xe4r \u2192 \udce4 \u2713" + b"\n"


def ascii_output(monkeypatch: pytest.MonkeyPatch) -> io.BytesIO:
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, "ascii", write_through=True))
    return shown


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
@pytest.mark.parametrize(
    ("encoding", "expected"),
    [
        ("ascii", rb"B\xe4r \u2192 \udce4 \u2713"),
        ("latin-1", b"B\xe4r \\u2192 \\udce4 \\u2713"),
        ("utf-8", b"B\xc3\xa4r \xe2\x86\x92 \\udce4 \xe2\x9c\x93"),
    ],
)
def test_characters(
    encoding: str, errors: str, expected: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding, errors))
    prepare_streams()
    print(TEXT, end="", flush=True)
    assert shown.getvalue() == expected


@pytest.mark.parametrize(
    "stream", [io.StringIO(), io.TextIOWrapper(io.BytesIO(), "ascii", "replace")]
)
def test_other_streams_stay_as_they_are(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", stream)
    before = getattr(stream, "errors", None)
    prepare_streams()
    assert getattr(stream, "errors", None) == before


@click.command
def says() -> None:
    """Print what ASCII lacks."""
    print(TEXT)


def test_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(main.commands, "says", says)
    shown = ascii_output(monkeypatch)
    main(["says"], standalone_mode=False)
    assert shown.getvalue() == ESCAPED


@pytest.mark.mpi(2)
def test_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = ascii_output(monkeypatch)
    chainermn.create_communicator("naive")
    print(TEXT)
    assert shown.getvalue() == ESCAPED
