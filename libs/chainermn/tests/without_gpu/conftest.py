"""A stand-in for a GPU: see stand_in_gpu.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chainermn.transport.gpu import device as gpu


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Let chainermn believe in a GPU."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    import stand_in_gpu

    found = stand_in_gpu.StandInGpu()
    gpu.use(found)
    yield found
    gpu.use(None)
