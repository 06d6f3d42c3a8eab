"""Fallbacks for systems where Python lacks what it has on Linux."""

from __future__ import annotations

import os
import runpy

import pytest

from chainermn.process import cores, main_thread


def test_cores_without_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert cores.cores_of_job() == 3
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cores.cores_of_job() == 1


def test_stack_without_files_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    fresh = runpy.run_path(main_thread.__file__)  # one that has no file yet
    stack = fresh["main_stack"]()
    assert "test_stack_without_files_in_memory" in [place.function for place in stack]
