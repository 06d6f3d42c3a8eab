"""Every repair works, is needed where it is active, and is harmless where it is not."""

import runpy
from pathlib import Path

import pytest

from chainer_compat.registry import REPAIRS

CHECKS = Path(__file__).parent / "checks.py"
each_repair = pytest.mark.parametrize("repair", REPAIRS, ids=lambda repair: repair.name)


@each_repair
def test_with_the_repair_the_check_passes(repair, failures):
    failure = failures(CHECKS, REPAIRS)[repair.name]
    assert failure is None, failure


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(number, marks=pytest.mark.nightly) for number in (1, 2, 3))]
)
def test_without_it_the_check_fails_where_the_fault_is_present(first, failures, is_at_fault):
    repairs = tuple(REPAIRS[first::4])  # each check imports Chainer again
    found = failures(CHECKS, repairs, "--without")
    has_failed = {name: failure is not None for name, failure in found.items()}
    assert has_failed == {repair.name: is_at_fault(repair) for repair in repairs}, found


def test_every_repair_has_a_check():
    checks = runpy.run_path(str(CHECKS))["CHECKS"]
    assert sorted(checks) == sorted(repair.name for repair in REPAIRS)
