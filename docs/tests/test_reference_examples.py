"""Every function and class of the API reference has examples, which run as written.

They run on two ranks, after the lines that the first page of the reference shows. The outputs of
the ranks are joined, rank 0 first, unless all are the same.
"""

from __future__ import annotations

import contextlib
import doctest
import inspect
import re
import subprocess
import sys
from typing import Any

import pages
import pytest
import reference

CALLABLES = reference.callables()
#: Their examples start jobs, which a rank cannot, or change their process permanently.
ALONE = (
    "chainermn.communicators.register",
    "chainermn.global_except_hook.exit_job",
    "chainermn.iterators.MultiprocessIterator",
    "chainermn.iterators.start_forkserver",
    "chainermn.launch.run",
    "chainermn.progress.silence",
    "chainermn.testing.mpiexec.JobResult",
    "chainermn.testing.mpiexec.run_job",
)

_OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
_SECTION = re.compile(r"^Examples\n-{8}\n(.*?)(?=^\w[\w ]*\n-+\n|\Z)", re.MULTILINE | re.DOTALL)


class OutputOfAllRanks(doctest.OutputChecker):
    """Checker for what all ranks print."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._joined = ""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        outputs = self._comm.allgather_obj(got)
        self._joined = got if len(set(outputs)) == 1 else "".join(outputs)
        return super().check_output(want, self._joined, optionflags)

    def output_difference(self, example: doctest.Example, got: str, optionflags: int) -> str:
        return super().output_difference(example, self._joined, optionflags)


def examples_of(name: str) -> str:
    """Return the examples in a docstring, or an empty text if it has none."""
    found = _SECTION.search(inspect.getdoc(CALLABLES[name]) or "")
    return found[1] if found else ""


def run_examples(name: str) -> None:
    names: dict[str, Any] = {}
    exec(prologue(), names)
    test = doctest.DocTestParser().get_doctest(examples_of(name), names, name, None, None)
    said: list[str] = []
    checker = OutputOfAllRanks(names["comm"])
    runner = doctest.DocTestRunner(checker, optionflags=_OPTIONS | doctest.FAIL_FAST)
    assert not runner.run(test, out=said.append).failed, "".join(said)


def prologue() -> str:
    """Return the lines that come before all examples."""
    index = reference.API / "index.md"
    return next(block.text for block in pages.blocks(index) if block.language == "python")


def test_everything_in_the_reference_has_examples():
    assert [name for name in CALLABLES if ">>> " not in examples_of(name)] == []


@pytest.mark.mpi(2)
@pytest.mark.parametrize("name", sorted({*CALLABLES} - {*ALONE}))
def test_examples_on_ranks(name, shared_tmp_path):
    with contextlib.chdir(shared_tmp_path):
        run_examples(name)


def test_examples_in_a_process_of_their_own(tmp_path):
    command = [sys.executable, __file__]
    assert (
        subprocess.run(command, cwd=tmp_path, check=False, stderr=subprocess.STDOUT).returncode
        == 0
    )


if __name__ == "__main__":
    for name in ALONE:
        run_examples(name)
