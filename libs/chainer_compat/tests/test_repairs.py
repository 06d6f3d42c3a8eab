"""Every repair works, is needed where it is active, and is harmless where it is not."""

import json
import os
import runpy
import sys
from pathlib import Path

import pytest

from chainer_compat.onednn import library
from chainer_compat.registry import REPAIRS

CHECKS = Path(__file__).parent / "checks.py"


@pytest.fixture(params=REPAIRS, ids=lambda repair: repair.name)
def repair(request):
    return request.param


def needs_cupy(repair):
    return repair.fault.__module__.endswith(".cupy14")


@pytest.fixture(scope="module")
def failures(execute, fake_cupy, fake_cudnn):
    """Run all checks in fresh interpreters; return how each failed, or None where it passed."""

    def run(*arguments):
        found = {}
        for with_cupy in (True, False):
            repairs = [repair for repair in REPAIRS if needs_cupy(repair) == with_cupy]
            environment = {repair.option: "1" for repair in repairs if repair.option}
            if with_cupy:
                environment["PYTHONPATH"] = os.pathsep.join((fake_cupy, fake_cudnn))
            names = [repair.name for repair in repairs]
            result = execute(
                sys.executable, "-W", "error", CHECKS, *arguments, *names, **environment
            )
            assert result.returncode == 0, result.stderr
            found |= json.loads(result.stdout.splitlines()[-1])
        return found

    return run


@pytest.fixture(scope="module")
def failures_with_all_repairs(failures):
    return failures()


@pytest.fixture(scope="module")
def failures_without_repair(failures):
    return failures("--without")


def test_with_the_repair_the_check_passes(repair, failures_with_all_repairs):
    if repair.name.startswith("onednn-") and library.why_not():
        pytest.skip(library.why_not())
    failure = failures_with_all_repairs[repair.name]
    assert failure is None, failure


def test_without_it_the_check_fails_where_the_fault_is_present(repair, failures_without_repair):
    fault = needs_cupy(repair) or repair.status()[0] == "active"
    failure = failures_without_repair[repair.name]
    assert (failure is not None) == fault, failure


def test_every_repair_has_a_check():
    checks = runpy.run_path(str(CHECKS))["CHECKS"]
    assert sorted(checks) == sorted(repair.name for repair in REPAIRS)
