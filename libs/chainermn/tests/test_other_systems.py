"""Fallbacks for systems where Python lacks what it has on Linux."""

from __future__ import annotations

import os

import pytest

from chainermn.failures import main_thread
from chainermn.process import cores


def test_cores_without_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert cores._usable_cores() == {0, 1, 2}
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cores._usable_cores() == {0}


def test_stack_without_files_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    main_thread._scratch_file.cache_clear()
    try:
        stack = main_thread.main_stack()
        assert "test_stack_without_files_in_memory" in [place.function for place in stack]
    finally:
        os.close(main_thread._scratch_file())
        main_thread._scratch_file.cache_clear()
