"""Run a script several times on the same ranks, each time with other arguments.

Starting ranks and importing Chainer takes a second, but checking an argument takes only a few
milliseconds. Each rank runs this module.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from chainermn.notes import without_notes
from chainermn.testing.mpiexec import JobResult, run_job


def run_in_turn(
    ranks: int,
    script: str | os.PathLike[str],
    cases: Sequence[Sequence[object]],
    *,
    timeout: float = 600,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> list[JobResult]:
    """Run a script several times in one job, each time with other arguments.

    This is much faster than one job per run, for example to test error messages. On all ranks,
    the script must return or raise `SystemExit`. The modules that it imports are imported once.

    Parameters
    ----------
    ranks : int
        Number of ranks.
    script : path
        Script to run.
    cases : sequence of sequences
        Arguments of each run.
    timeout, env, cwd
        The parameters of `run_job`, for the whole job.

    Returns
    -------
    list of JobResult
        One result per run. Its ``returncode`` is the largest exit code of the ranks. Its output
        is that of all ranks, in any order.

    Raises
    ------
    RuntimeError
        If the job ends in any other way; the message contains the output.

    Examples
    --------
    >>> from pathlib import Path
    >>> from chainermn.testing.in_turn import run_in_turn
    >>> length = Path("check.py").write_text("import sys; sys.exit(int(sys.argv[1]) < 1)")
    >>> [result.returncode for result in run_in_turn(2, "check.py", [["0"], ["5"]])]
    [1, 0]
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "cases").write_text(json.dumps([list(map(str, case)) for case in cases]))
        job = run_job(ranks, ["-m", __name__, folder, script], timeout=timeout, env=env, cwd=cwd)
        runs = range(len(cases))
        outs, errs, codes = (
            ["".join(_read(path) for path in folder.glob(f"{run}.*.{kind}")) for run in runs]
            for kind in ("out", "err", "code")
        )
    unfinished = [run for run in runs if len(codes[run].split()) != ranks]
    if unfinished or job.returncode or job.timed_out or job.left_behind:
        run = unfinished[0] if unfinished else runs[-1]
        where = f"{script} {' '.join(map(str, cases[run]))}"
        said = outs[run] + errs[run]
        raise RuntimeError(f"{where} did not end on every rank:\n{said}\nThe job: {job}")
    return [
        replace(job, returncode=max(map(int, code.split())), stdout=out, stderr=without_notes(err))
        for out, err, code in zip(outs, errs, codes, strict=True)
    ]


def _read(path: Path) -> str:
    return path.read_text(errors="replace")


def main(folder: Path, script: str) -> None:
    """Run a script with each list of arguments in a folder, and write the results there."""
    sys.path[0] = str(Path(script).resolve().parent)
    for run, arguments in enumerate(json.loads((folder / "cases").read_text())):
        sys.argv = [script, *arguments]
        code = 0
        # Each rank has its own files, because ranks that print in pieces would mix their output.
        own = f"{folder}/{run}.{os.getpid()}"
        with _written_to(1, f"{own}.out"), _written_to(2, f"{own}.err"):
            try:
                runpy.run_path(script, run_name="__main__")
            except SystemExit as end:
                said = end.code or 0
                if not isinstance(said, int):  # a message, which Python would print
                    print(said, file=sys.stderr)
                    said = 1
                code = int(said) & 255  # as the system does
        Path(f"{own}.code").write_text(f"{code}\n")


@contextlib.contextmanager
def _written_to(descriptor: int, path: str) -> Iterator[None]:
    """Redirect a file descriptor to a file, also for C code."""
    before = os.dup(descriptor)
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, descriptor)
    os.close(file)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(before, descriptor)
        os.close(before)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
