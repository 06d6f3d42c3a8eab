"""Benchmarks use the tools of ci, which must not use them."""

from __future__ import annotations

import re
from pathlib import Path

CI = Path(__file__).resolve().parents[1]


def test_ci_does_not_import_benchmarks() -> None:
    imports = re.compile(r"^\s*(?:from|import) benchmarks\b", re.MULTILINE)
    assert [path for path in CI.rglob("*.py") if imports.search(path.read_text())] == []
