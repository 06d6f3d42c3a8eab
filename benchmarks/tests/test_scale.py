"""The page about many ranks, from made-up figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import figures, report, scale
from benchmarks.figures import Group, Measured
from benchmarks.scale import MEMORY, ORIGINAL, OURS


def group(figure: str, ranks: int, ours: float, original: float) -> Group:
    rows = [Measured(OURS, [ours] * 3), Measured(ORIGINAL, [original] * 3)]
    if figure == "create":
        rows[0].more[MEMORY], rows[1].more[MEMORY] = 110.0, 100.0
    title = f"{figure}; {ranks} ranks, one host"
    return Group(title, {"figure": figure, "ranks": str(ranks)}, rows, ORIGINAL)


GROUPS = [
    group("create", 128, 30, 20),
    group("create", 8, 0.8, 0.4),
    group("exchange", 8, 0.009, 0.006),
    group("first", 8, 0.12, 0.03),
]


def test_rows_are_sorted_and_have_both_and_their_ratio() -> None:
    heads, _, *rows = scale.table(GROUPS)
    assert heads.startswith("| ranks | create_communicator, s | original | ratio | first exchange")
    assert rows == [
        "| 8 | 0.8 | 0.4 | 2.00 | 0.12 | 0.03 | 4.00 | 9 | 6 | 1.50 | 110 | 100 | 1.10 |",
        "| 128 | 30 | 20 | 1.50 |  |  |  |  |  |  | 110 | 100 | 1.10 |",
        "",
        "- Measured 3 times, each time in a new job.",
    ]


def test_the_page_has_a_table_for_each_mpi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    report.save("scale", "mpich", GROUPS, [])
    report.save("scale", "openmpi", GROUPS[1:], [])
    scale.write("scale")
    scale.draw()
    lines = (tmp_path / "scale.md").read_text().splitlines()
    headings = [line for line in lines if line.startswith("## ")]
    assert headings == ["## How it was measured", "## MPICH", "## Open MPI"]
    assert sum(line.startswith("| 8 |") for line in lines) == 2
    assert "128 ranks" in (tmp_path / "scale.svg").read_text()
