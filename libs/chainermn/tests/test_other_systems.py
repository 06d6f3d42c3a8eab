"""What is done where Python lacks what Linux has."""

from __future__ import annotations

import os

import pytest

from chainermn import process
from chainermn.failures import stack


def test_cores_without_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert process._usable_cores() == {0, 1, 2}
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert process._usable_cores() == {0}


def test_stack_without_files_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    stack._scratch_file.cache_clear()
    try:
        assert "test_stack_without_files_in_memory" in [p.function for p in stack.main_stack()]
    finally:
        os.close(stack._scratch_file())
        stack._scratch_file.cache_clear()
