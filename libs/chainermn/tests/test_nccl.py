"""`chainermn.nccl` without CuPy, and with a stand-in for it."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

import chainermn.nccl
import chainermn.testing


def test_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    assert chainermn.nccl._available is False
    with pytest.raises(AttributeError, match="get_version needs a CuPy with NCCL"):
        chainermn.nccl.get_version()


def test_with_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy, cuda, nccl = (ModuleType(name) for name in ("cupy", "cupy.cuda", "cupy.cuda.nccl"))
    monkeypatch.setattr(cuda, "nccl", nccl, raising=False)
    monkeypatch.setattr(nccl, "get_version", lambda: 23203, raising=False)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    assert chainermn.nccl._available is True
    assert chainermn.nccl.get_version() == 23203


def test_name_that_is_not_nccls() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'speed'"):
        chainermn.nccl.speed  # noqa: B018


def test_get_device() -> None:
    assert chainermn.testing.get_device().name == "@numpy"
    with pytest.raises(ValueError, match="ChainerX"):
        chainermn.testing.get_device(0, use_chainerx=True)
