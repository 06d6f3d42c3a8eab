"""The trainers of these tests."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def trainers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import trainers.py."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    import trainers

    return trainers
