"""Run a script several times in the same ranks, each time with other arguments.

To start ranks and import Chainer takes a second, to refuse an argument a few milliseconds. Each
rank runs this module.
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
    """Run a script with each of several lists of arguments, one after the other, in one job.

    For a script that ends by itself or by `SystemExit` on all ranks. The modules that it imports
    are imported once.

    Parameters
    ----------
    ranks : int
    script : path
    cases : sequence of sequences
        The arguments of each run.
    timeout, env, cwd
        Those of `run_job`, for the whole job.

    Returns
    -------
    list of JobResult
        One for each run. Its ``returncode`` is the largest exit code of the ranks, and its
        output that of one rank after the other, in any order.

    Raises
    ------
    RuntimeError
        If the job ends otherwise; it has the output.
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
    """Run a script with all arguments that a folder names, and write there how it ended."""
    sys.path[0] = str(Path(script).resolve().parent)
    for run, arguments in enumerate(json.loads((folder / "cases").read_text())):
        sys.argv = [script, *arguments]
        code = 0
        # Each rank has files of its own: ranks that print in pieces would mix them.
        own = f"{folder}/{run}.{os.getpid()}"
        with _written_to(1, f"{own}.out"), _written_to(2, f"{own}.err"):
            try:
                runpy.run_path(script, run_name="__main__")
            except SystemExit as end:
                said = end.code or 0
                if not isinstance(said, int):  # a message, as Python takes it
                    print(said, file=sys.stderr)
                    said = 1
                code = int(said) & 255  # as the system takes it
        Path(f"{own}.code").write_text(f"{code}\n")


@contextlib.contextmanager
def _written_to(descriptor: int, path: str) -> Iterator[None]:
    """Have what is written to a descriptor, also by C code, written to a file."""
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
