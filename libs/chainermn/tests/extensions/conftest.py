"""The small job of these tests."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import training.py."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    import training

    return training
