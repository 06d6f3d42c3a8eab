"""``chainermn launch`` inside an allocation."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ci.slurm.jobs import BatchJob
from ci.slurm.test_srun import ADD_RANKS, FOUR

LAUNCH = [sys.executable, "-m", "chainermn", "launch"]


@pytest.mark.parametrize(
    ("options", "arguments", "expected"),
    [
        (["--nodes=3", "--ntasks=4"], [], FOUR),
        (["--ntasks=2"], [], [f"rank {rank} of 2 on host 0 sum 3" for rank in (0, 1)]),
        (
            ["--nodes=3", "--ntasks=3"],
            ["--host", "host01:1,host02:1"],
            [f"rank {rank} of 2 on host {rank} sum 3" for rank in (0, 1)],
        ),
    ],
    ids=["all hosts", "one host", "some hosts"],
)
def test_ranks_are_the_tasks(
    submit: Callable[..., BatchJob], options: list[str], arguments: list[str], expected: list[str]
) -> None:
    job = submit(shlex.join([*LAUNCH, *arguments, *ADD_RANKS[1:]]), *options)
    job.wait()
    assert sorted(job.output().split("\n")) == ["", *expected]


def test_exit_code_is_that_of_the_ranks(
    submit: Callable[..., BatchJob], shared_path: Path
) -> None:
    script = shared_path / "fails.py"
    script.write_text("import sys, chainermn; chainermn.create_communicator('naive'); sys.exit(7)")
    record = submit(shlex.join([*LAUNCH, str(script)]), "--nodes=3").wait(state="FAILED")
    assert record["ExitCode"] == "7:0"
