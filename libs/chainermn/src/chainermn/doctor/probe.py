"""Ask another process: a probe that crashes, hangs or prints nonsense is an answer as well.

This file is also what runs in that process: it finds its own ``chainermn``, calls ``examine`` of
a module in ``probes/`` and prints what that returns, unless it is None.
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
    """What became of a probe.

    Attributes
    ----------
    answers : list
        What its processes returned.
    failure : str
        Why there is no answer to rely on; empty if there is one.
    """

    answers: list[Any]
    failure: str = ""

    @property
    def answer(self) -> Any:
        """The first answer, or None."""
        return self.answers[0] if self.answers else None


def probe_command(name: str, limit: float, **arguments: Any) -> list[str]:
    """Return the command that runs ``examine(**arguments)`` of a module in ``probes/``.

    Parameters
    ----------
    name : str
    limit : float
        Seconds after which the process ends itself, on whatever host it runs.
    """
    # -P: a file in the current folder must not take the place of a module.
    return [sys.executable, "-P", __file__, name, str(limit), json.dumps(arguments)]


def ask(
    command: Sequence[str], limit: float, environment: Mapping[str, str] | None = None
) -> Outcome:
    """Run a command and read what its probes say, for at most ``limit`` seconds."""
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        return Outcome([], str(error))
    try:
        raw_out, raw_err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        _end(process)
        return Outcome([], f"no answer within {limit:g} s")
    out, err = (raw.decode(errors="replace").replace("\0", "") for raw in (raw_out, raw_err))
    said: dict[str, list[Any]] = {"answer": [], "error": []}
    for line in out.splitlines():
        with contextlib.suppress(ValueError, KeyError):  # the lines of two processes may mix
            if _MARK in line:
                kind, content = json.loads(line.partition(_MARK)[2])
                said[kind].append(content)
    return Outcome(said["answer"], _failure(process.returncode, said, err))


def _failure(code: int, said: dict[str, list[Any]], err: str) -> str:
    if code == 0 and said["answer"]:
        return ""
    if said["error"]:
        return str(said["error"][0])
    lines = [line.strip() for line in err.splitlines() if re.search(r"\w", line)]
    last = f": {lines[-1]}" if lines else ""
    if code < 0:
        return f"crashed with {signal.Signals(-code).name}{last}"
    return f"ended with exit code {code} and no answer{last}"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()  # lets mpiexec end its ranks
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=3)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=3)


def _run_here(name: str, limit: str, arguments: str) -> None:
    import faulthandler
    import importlib
    import traceback

    faulthandler.dump_traceback_later(float(limit), exit=True)
    sys.path.insert(0, str(Path(__file__).parents[2]))
    try:
        probe = importlib.import_module(f"chainermn.doctor.probes.{name}")
        answer = probe.examine(**json.loads(arguments))
    except Exception as error:
        *_, place = traceback.extract_tb(error.__traceback__)
        _say("error", f"{type(error).__name__}: {error}, at {place.filename}:{place.lineno}")
        os._exit(1)  # else MPI would wait for the other ranks
    if answer is not None:
        _say("answer", answer)


def _say(kind: str, content: Any) -> None:
    # In one piece, and not at the end of a line that somebody else has begun.
    os.write(1, f"\n{_MARK}{json.dumps([kind, content])}\n".encode())


if __name__ == "__main__":
    _run_here(*sys.argv[1:])
