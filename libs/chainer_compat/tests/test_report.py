"""``python -m chainer_compat``."""

import json
import os

import numpy
import pytest

from chainer_compat import report
from chainer_compat.registry import REPAIRS, all_repairs

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
    names = [repair["name"] for repair in found["repairs"]]
    assert names == [repair.name for repair in all_repairs()]
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


def test_without_chainer_fast_chainer_computes_with_numpy(python):
    code = f"import sys; sys.modules['chainer_fast'] = None; {MAIN.format(['--json'])}"
    found = json.loads(python(code))
    assert found["onednn"] == "not used: chainer-fast is not installed"
    assert [repair["name"] for repair in found["repairs"]] == [repair.name for repair in REPAIRS]
    assert found["chainer"].endswith("__init__.py")
