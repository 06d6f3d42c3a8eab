"""Run probes in another process, so that they may crash, hang or print nonsense.

The other process runs this file, too: it finds its own ``chainermn``, calls functions of `probes`
and prints each answer that is not None.
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
# MPICH's last lines say only that mpiexec failed. The first one of a host gives the cause.
_CAUSE = re.compile(r"^\[proxy:\d+@(\S+)\] .*: (unable to .*)", re.MULTILINE)
_GRACE = 10.0
#: Makes MPICH's ranks sleep between two looks for messages, for hosts with fewer cores than ranks.
#: Open MPI always gets such a setting.
TAKING_TURNS = {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}
# How much longer a rank may sleep. With the default of 50 us, many ranks would do little but look.
_OVERSLEEP = "1000000"  # ns


@dataclass(frozen=True)
class Outcome:
    """The first answer to a probe, and a failure that makes it unreliable, if there is one."""

    answer: Any = None
    failure: str = ""


def probe_command(names: Sequence[str], limit: float) -> list[str]:
    """Return the command that runs probes one after another, on any host.

    The command ends itself if a probe takes much longer than ``limit`` seconds, since `ask` may
    not be able to end it on another host.
    """
    # With -P, a file in the current folder cannot hide a module.
    return [sys.executable, "-P", __file__, ",".join(names), str(limit + _GRACE)]


def ask(
    command: Sequence[str],
    names: Sequence[str],
    limit: float,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Outcome]:
    """Run a command, and read the answers of its probes, each within ``limit`` seconds.

    If the command ends before all probes have answered, the rest get the reason as their failure.
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
    """Yield the lines that a process prints; raise TimeoutExpired if it is silent for too long."""
    from chainermn.process.patience import wait_patiently  # not in the other process

    assert process.stdout is not None
    begun = b""
    with process.stdout as out:
        while wait_patiently(lambda seconds: select.select([out], [], [], seconds)[0], limit):
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

    gc.disable()  # saves an eighth of the time for imports; nothing here runs long
    atexit.register(_end_here)  # registered first, so it is called last
    if TAKING_TURNS.items() <= os.environ.items():
        # OpenBLAS's threads first wait in a loop, which takes a quarter of the time for imports.
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
    """End without freeing memory, which would take a third as long as all the imports.

    A rank must end as usual: MPICH tells mpiexec only at exit that it has left MPI. Otherwise,
    mpiexec kills the ranks that are still leaving, and their shared memory stays behind.
    """
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if not (mpi and mpi.Is_initialized()):
        os._exit(0)


def _say(kind: str, name: str, content: Any) -> None:
    # One write and a separate line, because other processes print to the same pipe.
    os.write(1, f"\n{_MARK}{json.dumps([kind, name, content])}\n".encode())


if __name__ == "__main__":
    _run_here(*sys.argv[1:])
