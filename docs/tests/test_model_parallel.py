"""What the examples of docs/model_parallel compute equals what one process computes."""

import pytest
from on_ranks import EXAMPLES, LIMIT, lines_of_ranks

pytestmark = pytest.mark.timeout(4 * LIMIT)


@pytest.mark.parametrize("name", ["two_halves", "chain_list"])
def test_model_on_two_ranks(name, tmp_path):
    assert lines_of_ranks(2, EXAMPLES / f"{name}.py", cwd=tmp_path) == ["as in one process: True"]


def test_delegates(tmp_path):
    lines = lines_of_ranks(2, EXAMPLES / "delegates.py", cwd=tmp_path)
    assert lines == ["[2.0, 2.0, 2.0] [3.0, 3.0, 3.0]"]
