"""Ask another process: a probe that crashes, hangs or prints nonsense is an answer as well.

That process runs this file too: it finds its own ``chainermn``, calls a function of `probes` and
prints the answer, unless it is None.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MARK = "chainermn-doctor-answer "


@dataclass(frozen=True)
class Outcome:
    """What a probe answered in the first process to do so, and why not to rely on it, if so."""

    answer: Any = None
    failure: str = ""


def probe_command(name: str, limit: float) -> list[str]:
    """Return the command that runs a probe and ends after ``limit`` seconds, on any host."""
    # -P: a file in the current folder must not take the place of a module.
    return [sys.executable, "-P", __file__, name, str(limit)]


def ask(
    command: Sequence[str], limit: float, environment: Mapping[str, str] | None = None
) -> Outcome:
    """Run a command for at most ``limit`` seconds, and read the answer of its probes."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        _end(process)
        return Outcome(failure=f"no answer within {limit:g} s")
    said: dict[str, Any] = {}
    for line in out.replace("\0", "").splitlines():
        with contextlib.suppress(ValueError):  # the lines of two processes may mix
            kind, content = json.loads(line.partition(_MARK)[2])
            said.setdefault(kind, content)
    return Outcome(said.get("answer"), _failure(process.returncode, said, err.replace("\0", "")))


def _failure(code: int, said: dict[str, Any], err: str) -> str:
    if code == 0 and "answer" in said:
        return ""
    if "error" in said:
        return str(said["error"])
    lines = [line.strip() for line in err.splitlines() if re.search(r"\w", line)]
    last = f": {lines[-1]}" if lines else ""
    if code < 0:
        return f"crashed with {signal.Signals(-code).name}{last}"
    return f"ended with exit code {code} and no answer{last}"


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()  # lets mpiexec end its ranks
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=3)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=3)


def _run_here(name: str, limit: str) -> None:
    import faulthandler
    import traceback

    faulthandler.dump_traceback_later(float(limit), exit=True)
    sys.path.insert(0, str(Path(__file__).parents[2]))
    try:
        from chainermn.doctor import probes

        answer = getattr(probes, name)()
    except Exception as error:
        *_, place = traceback.extract_tb(error.__traceback__)
        _say("error", f"{type(error).__name__}: {error}, at {place.filename}:{place.lineno}")
        os._exit(1)  # MPI's own end would wait for the other ranks
    if answer is not None:
        _say("answer", answer)


def _say(kind: str, content: Any) -> None:
    # In one write, on a line of its own: other processes print to the same pipe.
    os.write(1, f"\n{_MARK}{json.dumps([kind, content])}\n".encode())


if __name__ == "__main__":
    _run_here(*sys.argv[1:])
