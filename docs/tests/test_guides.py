"""Lines that the guides show without running them are those of an example that is run."""

from __future__ import annotations

import re

import pages
import pytest
from on_ranks import EXAMPLES, lines_of_ranks

SHOWN = pages.marked(r"not run: docs/examples/\w+\.py runs these lines")


@pytest.mark.parametrize("block", SHOWN, ids=str)
def test_lines_are_those_of_the_example(block: pages.Block) -> None:
    example = re.findall(r"docs/(examples/\w+\.py)", block.mark)[0]
    lines = [line.strip() for line in pages.read(pages.DOCS / example).splitlines()]
    shown = "\n".join(line.strip() for line in block.text.splitlines())
    assert f"\n{shown}\n" in "\n".join(lines)


def test_what_a_slow_network_needs_learns(tmp_path) -> None:
    lines = lines_of_ranks(2, EXAMPLES / "slow_network.py", cwd=tmp_path)
    options = "accumulated", "compressed_and_local", "local", "power_sgd", "top_k", "uneven"
    assert lines == [f"{option}: learns" for option in options]
