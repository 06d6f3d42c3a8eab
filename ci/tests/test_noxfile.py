"""What the sessions of nox find out about a machine."""

from __future__ import annotations

import ctypes
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

NOXFILE = Path(__file__).parents[2] / "noxfile.py"


@pytest.fixture
def cuda_of_driver(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int | None]:
    monkeypatch.setitem(sys.modules, "nox", MagicMock())  # tests do without it
    found: Callable[[], int | None] = runpy.run_path(str(NOXFILE))["cuda_of_driver"]
    return found


class FakeDriver:
    """Stand-in for ``libcuda.so.1``; without GPUs it does not start."""

    def __init__(self, version: int, capabilities: list[int]) -> None:
        self._version = version
        self._capabilities = capabilities

    def cuInit(self, flags: int) -> int:
        return 0 if self._capabilities else 100

    def cuDriverGetVersion(self, version: Any) -> None:
        version._obj.value = self._version

    def cuDeviceGetCount(self, count: Any) -> None:
        count._obj.value = len(self._capabilities)

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> None:
        value._obj.value = divmod(self._capabilities[device], 10)[attribute - 75]


@pytest.mark.parametrize(
    ("version", "capabilities", "cuda"),
    [
        (13000, [90], 13),
        (13000, [75], 13),
        (13000, [70], 12),
        (13000, [120, 103, 61], 12),
        (13000, [], 13),
        (12090, [90], 12),
    ],
)
def test_cuda_is_for_driver_and_oldest_gpu(
    cuda_of_driver: Callable[[], int | None],
    version: int,
    capabilities: list[int],
    cuda: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeDriver(version, capabilities))
    assert cuda_of_driver() == cuda


def test_no_cuda_without_a_driver(
    cuda_of_driver: Callable[[], int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def cdll(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", cdll)
    assert cuda_of_driver() is None
