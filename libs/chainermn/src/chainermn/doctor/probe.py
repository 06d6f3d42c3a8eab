"""Ask another process: a probe that crashes, hangs or prints nonsense is an answer as well.

That process runs this file too: it finds its own ``chainermn``, calls functions of `probes` and
prints each answer, unless it is None.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MARK = "chainermn-doctor-answer "
# MPICH's last lines say only that mpiexec has failed; the cause is in the first of some host.
_CAUSE = re.compile(r"^\[proxy:\d+@(\S+)\] .*: (unable to .*)", re.MULTILINE)
_GRACE = 10.0
#: For ranks that outnumber cores. Of MPICH (Open MPI always gets the like): who waits for others
#: sleeps between looking for messages.
TAKING_TURNS = {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}
# How much longer than asked for. By default 50 us: many ranks would do little else than look.
_OVERSLEEP = "1000000"  # ns


@dataclass(frozen=True)
class Outcome:
    """What a probe answered in the first process to do so, and why not to rely on it, if so."""

    answer: Any = None
    failure: str = ""


def probe_command(names: Sequence[str], limit: float) -> list[str]:
    """Return the command that runs probes in turn, on any host.

    It ends if one takes much longer than ``limit`` seconds: `ask` may not be able to end it there.
    """
    # -P: a file in the current folder must not take the place of a module.
    return [sys.executable, "-P", __file__, ",".join(names), str(limit + _GRACE)]


def ask(
    command: Sequence[str],
    names: Sequence[str],
    limit: float,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Outcome]:
    """Run a command, and read the answers of its probes, each within ``limit`` seconds.

    What ends the command before all have answered is the failure of all that have not.
    """
    said: dict[tuple[str, str], Any] = {}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
        try:
            for line in _lines(process, limit):
                with contextlib.suppress(ValueError):  # the lines of two processes may mix
                    kind, name, content = json.loads(line.partition(_MARK)[2])
                    said.setdefault((kind, name), content)
            process.wait(limit)
            failure = ""
        except subprocess.TimeoutExpired:
            _end(process)
            failure = f"no answer within {limit:g} s"
        errors.seek(0)
        failure = failure or _failure(process.returncode, errors.read().replace("\0", ""))
    failure = next((str(text) for (kind, _), text in said.items() if kind == "error"), failure)
    outcomes = {}
    for name in names:
        complete = ("answer", name) in said and (name != names[-1] or process.returncode == 0)
        why = said.get(("error", name), "" if complete else failure)
        outcomes[name] = Outcome(said.get(("answer", name)), why)
    return outcomes


def _lines(process: subprocess.Popen[bytes], limit: float) -> Iterator[str]:
    """Yield what a process prints; raise TimeoutExpired if no line comes for so long."""
    assert process.stdout is not None
    begun = b""
    with process.stdout as out:
        while select.select([out], [], [], limit)[0]:
            read = os.read(out.fileno(), 1 << 16)
            *lines, begun = (begun + read).split(b"\n")
            for line in lines if read else [*lines, begun]:
                yield line.decode(errors="replace").replace("\0", "")
            if not read:
                return
        raise subprocess.TimeoutExpired(process.args, limit)


def _failure(code: int, err: str) -> str:
    lines = [line.strip() for line in err.splitlines() if re.search(r"\w", line)]
    cause = f": {lines[-1]}" if lines else ""
    if found := _CAUSE.search(err):
        cause = f": {found[1]}: {found[2]}"
    if code < 0:
        return f"crashed with {signal.Signals(-code).name}{cause}"
    return f"ended with exit code {code} and no answer{cause}"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()  # lets mpiexec end its ranks
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=3)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _run_here(names: str, limit: str) -> None:
    import atexit
    import faulthandler
    import gc
    import traceback

    gc.disable()  # an eighth of the time that imports take; nothing here runs for long
    atexit.register(_end_here)  # what is registered first is called last
    if TAKING_TURNS.items() <= os.environ.items():
        # The threads of OpenBLAS wait in a loop at first: a quarter of the time of all imports.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        with contextlib.suppress(OSError):
            Path("/proc/self/timerslack_ns").write_text(_OVERSLEEP)
    sys.path.insert(0, str(Path(__file__).parents[2]))
    for name in names.split(","):
        faulthandler.dump_traceback_later(float(limit), exit=True)
        try:
            from chainermn.doctor import probes

            answer = getattr(probes, name)()
        except Exception as error:
            *_, place = traceback.extract_tb(error.__traceback__)
            text = f"{type(error).__name__}: {error}, at {place.filename}:{place.lineno}"
            _say("error", name, text)
            os._exit(1)  # MPI's own end would wait for the other ranks
        if answer is not None:
            _say("answer", name, answer)


def _end_here() -> None:
    """End without clearing up memory, which would take a third as long as all the imports."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
    os._exit(0)


def _say(kind: str, name: str, content: Any) -> None:
    # In one write, on a line of its own: other processes print to the same pipe.
    os.write(1, f"\n{_MARK}{json.dumps([kind, name, content])}\n".encode())


if __name__ == "__main__":
    _run_here(*sys.argv[1:])
