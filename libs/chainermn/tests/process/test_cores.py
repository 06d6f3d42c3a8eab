import os
import subprocess
import sys

import pytest

from chainermn.process.cores import cores_of_job


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux alone binds processes")
def test_a_rank_that_is_bound_to_a_core_knows_of_the_others() -> None:
    code = (
        "import os; from chainermn.process.cores import cores_of_job\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "print(cores_of_job())"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert int(shown.stdout) == len(os.sched_getaffinity(0)) == cores_of_job()
