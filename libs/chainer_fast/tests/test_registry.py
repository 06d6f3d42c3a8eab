"""Every row of the table makes its module faster, and only where its libraries are installed."""

import json
import os
import runpy
from pathlib import Path

import pytest

from chainer_fast.onednn import library
from chainer_fast.registry import REPAIRS

CHECKS = Path(__file__).parent / "checks.py"
each_repair = pytest.mark.parametrize("repair", REPAIRS, ids=lambda repair: repair.name)


@each_repair
def test_with_the_repair_the_check_passes(repair, failures):
    if repair.name.startswith("onednn-") and library.why_not():
        pytest.skip(library.why_not())
    failure = failures(CHECKS, REPAIRS)[repair.name]
    assert failure is None, failure


@each_repair
def test_without_it_the_check_fails_where_it_is_active(repair, failures, is_at_fault):
    failure = failures(CHECKS, REPAIRS, "--without")[repair.name]
    assert (failure is not None) == is_at_fault(repair), failure


def test_every_repair_has_a_check():
    checks = runpy.run_path(str(CHECKS))["CHECKS"]
    assert sorted(checks) == sorted(repair.name for repair in REPAIRS)


def test_an_option_is_said_to_be_off_or_on(python, fake_cupy, fake_cudnn):
    path = os.pathsep.join((fake_cupy, fake_cudnn))
    code = (
        "import json, os; from chainer_compat import report\n"
        "for value in ('', '0', '1'):\n"
        "    os.environ['CHAINER_COMPAT_CUDNN'] = value\n"
        "    print(json.dumps(report.collect()['repairs']))\n"
    )
    found = [json.loads(line) for line in python(code, PYTHONPATH=path).splitlines()]
    for repairs, status in zip(found, ("off", "off", "active"), strict=True):
        states = {repair["name"]: repair["status"] for repair in repairs}
        assert states["cudnn-convolution"] == status
        assert states["summary-float64"] == "active"
    assert "CHAINER_COMPAT_CUDNN=1" in found[0][-1]["reason"]
