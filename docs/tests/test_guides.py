"""Lines that pages show without running them come from a tested file."""

from __future__ import annotations

import pages
import pytest
from on_ranks import EXAMPLES, lines_here, mpi

SHOWN = pages.marked(r"not run: \S+ (?:runs|has) these lines")


@pytest.mark.parametrize("block", SHOWN, ids=str)
def test_lines_are_those_of_the_example(block: pages.Block) -> None:
    file = block.mark.split()[2]
    assert stripped(block.text) in stripped(pages.read(pages.ROOT / file))


def stripped(text: str) -> str:
    """Return a text without indentation and empty lines."""
    lines = (line.strip() for line in text.splitlines())
    return "".join(f"\n{line}" for line in lines if line) + "\n"


@mpi(2)
def test_what_a_slow_network_needs_learns() -> None:
    lines = lines_here(EXAMPLES / "slow_network.py")
    options = "accumulated", "compressed_and_local", "local", "power_sgd", "top_k", "uneven"
    assert lines == [f"{option}: learns" for option in options]
