"""The site under test, which ``nox -s docs`` has built in ``docs/_build``."""

from __future__ import annotations

from pathlib import Path

import pytest

SITE = Path(__file__).resolve().parents[2] / "docs/_build"


@pytest.fixture(scope="session")
def site() -> Path:
    if not (SITE / "index.html").exists():
        pytest.fail(f"there is no site in {SITE}: run ./noxw -s docs")
    return SITE
