"""The page about computing on the processor, from made-up figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import compute, figures, report
from benchmarks.compute import NUMPY, ONEDNN, TORCH
from benchmarks.figures import Group, Measured


def group(what: str, direction: str, threads: str, *, with_torch: bool = True) -> Group:
    rows = [Measured(NUMPY, [0.004, 0.004]), Measured(ONEDNN, [0.001, 0.002])]
    rows += [Measured(TORCH, [0.002, 0.002])] if with_torch else []
    key = {"what": what, "direction": direction, "threads": threads}
    return Group("; ".join(key.values()), key, rows, TORCH)


def test_a_row_has_the_medians_and_both_ratios() -> None:
    rows = compute.table([group("add", "forward", "one thread")])[2:]
    assert rows == ["| add | forward | 4.00 | 1.50 | 2.00 | 0.75 | 0.38 |"]
    rows = compute.table([group("add", "forward", "one thread", with_torch=False)])[2:]
    assert rows == ["| add | forward | 4.00 | 1.50 | - | - | 0.38 |"]


def test_rows_are_in_the_order_of_measurement() -> None:
    keys = [key for key, _ in compute.computations()]
    groups = [group(key["what"], key["direction"], "one thread") for key in reversed(keys)]
    found = [(g.key["what"], g.key["direction"]) for g in compute.in_order(groups)]
    assert found == [(key["what"], key["direction"]) for key in keys]


def test_the_page_has_a_table_for_each_number_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    threads = ["one thread", "8 threads"]
    groups = [group("add", direction, t) for t in threads for direction in compute.DIRECTIONS]
    report.save("compute", "mpich", groups, [])
    compute.write("compute")
    compute.draw()
    text = (tmp_path / "compute.md").read_text()
    headings = [line for line in text.splitlines() if line.startswith("### ")]
    assert headings == ["### One thread", "### 8 threads"]
    assert text.count("| add | backward |") == 2
    assert not (tmp_path / "compute.svg").exists()  # no network was measured
