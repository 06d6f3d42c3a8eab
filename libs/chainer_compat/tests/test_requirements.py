"""The stand-in for pkg_resources."""

import pytest

from chainer_compat.requirements import ResolutionError, WorkingSet


@pytest.mark.parametrize(
    "requirement", ["numpy", "numpy>=1.10", "numpy>=1,<99", "no-such-thing; python_version<'3'"]
)
def test_met(requirement):
    WorkingSet().require("chainer==7.8.1", requirement)


@pytest.mark.parametrize("requirement", ["numpy>=99", "no-such-thing", "no-such-thing>=1"])
def test_not_met(requirement):
    with pytest.raises(ResolutionError, match="is required, but"):
        WorkingSet().require("numpy", requirement)


def test_not_a_requirement():
    with pytest.raises(ValueError, match="'numpy>>1' is not a requirement"):
        WorkingSet().require("numpy>>1")
