"""Processes that were started without standard streams."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import json, os, sys
from chainermn import progress
from chainermn.process.streams import has_standard_error, prepare_streams

data = open("data", "w") if "data" in sys.argv else None  # gets a number of a stream
prepare_streams()
print("nobody sees this", file=sys.stderr)
print("nor this")
progress.silence()
found = [sys.stdin.read(), has_standard_error(), [os.get_inheritable(n) for n in range(3)]]
found.append([os.readlink(f"/proc/self/fd/{n}") for n in range(3)])
with open("found", "w") as file:
    json.dump(found, file)
"""


def start(folder: Path, streams: str, *arguments: str) -> list[object]:
    """Run the script in a folder, as a shell does with these redirections."""
    command = ["sh", "-c", f'exec "$@" {streams}', "sh", sys.executable, "-c", SCRIPT, *arguments]
    subprocess.run(command, cwd=folder, check=True, timeout=60, stdin=subprocess.DEVNULL)
    return list(json.loads((folder / "found").read_text()))


def test_closed_streams_become_the_null_device(tmp_path: Path) -> None:
    found = start(tmp_path, "<&- >&- 2>&-")
    assert found == ["", False, [True] * 3, ["/dev/null"] * 3]


def test_file_with_the_number_of_a_stream_stays_as_it_is(tmp_path: Path) -> None:
    *_, files = start(tmp_path, ">&- 2>&-", "data")
    assert files == ["/dev/null", str(tmp_path / "data"), "/dev/null"]
    assert (tmp_path / "data").read_text() == ""
