"""``python -m chainer_compat``."""

import json
import os

import numpy
import pytest

from chainer_compat import report
from chainer_compat.registry import REPAIRS

MAIN = (
    "import runpy, sys; sys.argv[1:] = {}; runpy.run_module('chainer_compat', run_name='__main__')"
)


def test_json(python):
    found = json.loads(python(MAIN.format(["--json"])))
    assert found["versions"]["chainer"] == "7.8.1"
    assert found["versions"]["numpy"] == numpy.__version__
    assert found["hook"] == "in place"
    assert found["chainer"].endswith("__init__.py")
    assert "chainermn" in found["chainermn"]
    assert [repair["name"] for repair in found["repairs"]] == [repair.name for repair in REPAIRS]
    states = {repair["name"]: repair["status"] for repair in found["repairs"]}
    assert states["summary-float64"] == "active"
    assert set(states.values()) <= {"active", "not needed", "not applicable", "off"}


@pytest.fixture
def collected(monkeypatch):
    """Return the report on this process, with some environment variables."""
    for name in os.environ:
        if name.startswith("CHAINER_COMPAT_"):
            monkeypatch.delenv(name)

    def collect(**environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return report.collect()

    return collect


def test_text(collected):
    lines = report.as_text(collected()).splitlines()
    assert lines[0].startswith("python ")
    assert any(line.split()[:2] == ["active", "as-strided-sctypes"] for line in lines)


@pytest.mark.parametrize(
    "environment, status",
    [({"CHAINER_COMPAT_DISABLE": "1"}, "off"), ({"CHAINER_COMPAT_SKIP": "fix-trunc"}, "skipped")],
    ids=["disabled", "skipped"],
)
def test_what_is_switched_off_is_said_to_be(environment, status, collected):
    found = collected(**environment)["repairs"]
    states = {repair["name"]: repair["status"] for repair in found}
    assert states["fix-trunc"] == status


def test_without_the_hook(python):
    code = (
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != 'Finder']"
    )
    found = json.loads(python(f"{code}\n{MAIN.format(['--json'])}"))
    assert found["hook"].startswith("not in place")
    assert found["chainer"].startswith("fails with AttributeError")


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
