"""Import paths: tests import modules beside them, and those that make the site, by name."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
pytest.register_assert_rewrite("on_ranks")
