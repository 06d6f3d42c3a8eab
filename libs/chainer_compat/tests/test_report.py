"""``python -m chainer_compat``."""

import json
import os

import numpy
import pytest

from chainer_compat.registry import REPAIRS

MAIN = (
    "import runpy, sys; sys.argv[1:] = {}; runpy.run_module('chainer_compat', run_name='__main__')"
)


def test_json(python):
    report = json.loads(python(MAIN.format(["--json"])))
    assert report["versions"]["chainer"] == "7.8.1"
    assert report["versions"]["numpy"] == numpy.__version__
    assert report["hook"] == "in place"
    assert report["chainer"].endswith("__init__.py")
    assert "chainermn" in report["chainermn"]
    assert [repair["name"] for repair in report["repairs"]] == [repair.name for repair in REPAIRS]
    states = {repair["name"]: repair["status"] for repair in report["repairs"]}
    assert states["summary-float64"] == "active"
    assert set(states.values()) <= {"active", "not needed", "not applicable", "off"}


def test_text(python):
    lines = python(MAIN.format([])).splitlines()
    assert lines[0].startswith("python ")
    assert any(line.split()[:2] == ["active", "as-strided-sctypes"] for line in lines)


@pytest.mark.parametrize(
    "environment, status",
    [({"CHAINER_COMPAT_DISABLE": "1"}, "off"), ({"CHAINER_COMPAT_SKIP": "fix-trunc"}, "skipped")],
    ids=["disabled", "skipped"],
)
def test_what_is_switched_off_is_said_to_be(environment, status, python):
    report = json.loads(python(MAIN.format(["--json"]), **environment))
    states = {repair["name"]: repair["status"] for repair in report["repairs"]}
    assert states["fix-trunc"] == status


def test_without_the_hook(python, tmp_path):
    code = (
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != 'Finder']"
    )
    report = json.loads(python(f"{code}\n{MAIN.format(['--json'])}"))
    assert report["hook"].startswith("not in place")
    assert report["chainer"].startswith("fails with AttributeError")


def test_an_option_is_said_to_be_off_or_on(python, fake_cupy, fake_cudnn):
    path = os.pathsep.join((fake_cupy, fake_cudnn))
    for value, status in (("0", "off"), ("1", "active")):
        report = json.loads(
            python(MAIN.format(["--json"]), PYTHONPATH=path, CHAINER_COMPAT_CUDNN=value)
        )
        repairs = {repair["name"]: repair for repair in report["repairs"]}
        assert repairs["cudnn-convolution"]["status"] == status
        assert repairs["summary-float64"]["status"] == "active"
    repair = json.loads(python(MAIN.format(["--json"]), PYTHONPATH=path))["repairs"][-1]
    assert repair["status"] == "off"
    assert "CHAINER_COMPAT_CUDNN=1" in repair["reason"]
