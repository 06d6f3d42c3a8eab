"""Tables, ratios and pages, from made-up figures and from those in docs/results."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from benchmarks import figures, report
from benchmarks.__main__ import ON_DEMAND, PARTS, write_pages
from benchmarks.figures import Group, Measured
from benchmarks.networks import link_seconds
from benchmarks.tests.test_plots import texts


@pytest.fixture
def group() -> Group:
    rows = [
        Measured("ours", [0.010, 0.020, 0.040], {"MB": 1.5}),
        Measured("original", [0.020, 0.050, 0.060]),
        Measured("absent", skipped="ValueError: not here"),
    ]
    return Group("iterations of a net", {"network": "net"}, rows, "original", 0.005, "the least")


def test_ratios_are_those_of_a_round(group: Group) -> None:
    assert group.ratio("ours", "original") == pytest.approx(0.5)  # the median of 0.5, 0.4 and 0.67
    assert group.ratio("original", "ours") == pytest.approx(2)
    assert group.ratio("absent", "ours") is None
    assert group.ratio("never heard of", "ours") is None


def test_table_has_medians_spread_ratios_and_reasons(group: Group) -> None:
    text = "\n".join(report.table(group))
    assert "| ChainerMN | 20.0 | 10.0-40.0 | 0.50 | 4.00 | 1.50 |" in text
    assert "| original ChainerMN | 50.0 | 20.0-60.0 | 1.00 | 10.00 |  |" in text
    assert "- Measured 3 times." in text
    assert "- Reference: the least." in text
    assert "- absent: ValueError: not here" in text


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ours", "ChainerMN"),
        ("ours default", "ChainerMN, default"),
        ("ours, overlap on", "ChainerMN, overlap on"),
        ("before: ours", "before: ChainerMN"),
        ("original naive", "original ChainerMN"),
        ("original naive, threads left alone", "original ChainerMN, threads left alone"),
        ("PyTorch DDP", "PyTorch DDP"),
    ],
)
def test_contestants_have_names_that_readers_know(name: str, expected: str) -> None:
    assert report.shown(name) == expected


def test_saved_groups_are_loaded_and_written(
    group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "PAGES", tmp_path / "pages")
    (tmp_path / "pages").mkdir()
    times = "<!-- measured: exchange: a third net: ours -->, or <!-- measured: exchange: ours -->"
    page = f"# Exchanges\n\nIt takes {times}.\n"
    (tmp_path / "pages/exchange.md").write_text(page)
    report.save("exchange", "mpich", [group], ["PyTorch: it is not installed"])
    loaded = figures.load("exchange")["mpich"]
    assert loaded["groups"] == [group]
    about = loaded["about"]
    assert set(about) == {"date", "machine", "versions", "commit", "command"}
    assert "exchange" in about["command"]

    other = Group("another net", {"network": "other"}, [Measured("ours", [1.0])], "ours")
    report.save("exchange", "mpich", [other], [])  # only this group
    titles = {found.title for found in figures.load("exchange")["mpich"]["groups"]}
    assert titles == {group.title, other.title}

    report.write("exchange")
    text = (tmp_path / "exchange.md").read_text()
    # Some tables may be measured before others.
    assert text.startswith("# Exchanges\n\nIt takes (not measured), or 20.0 to 1000 ms.\n")
    assert "## MPICH" in text
    assert json.loads((tmp_path / "raw/exchange-mpich.json").read_text())


def test_pages_and_plots_are_those_of_the_raw_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If they are not, run ``python -m benchmarks --write``."""

    def content(folder: Path) -> dict[str, object]:
        pages: dict[str, object] = {
            path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.md")
        }
        # Another version of matplotlib may write another file for the same plot.
        return pages | {path.name: texts(path) for path in folder.glob("*.svg")}

    results = figures.RESULTS
    shutil.copytree(results / "raw", tmp_path / "raw")
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    write_pages((*PARTS, *ON_DEMAND))
    assert content(tmp_path) == content(results)


PAGES = [*figures.RESULTS.glob("*.md"), figures.RESULTS.parent / "results.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_asks_and_answers(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "(not measured)" not in text
    assert not re.search(r"^\|(?: \||.*\| +\|).*\n\| *:?---", text, re.MULTILINE), "an empty head"
    if page.name != "README.md":
        assert text.partition("\n")[0].endswith("?")
    for words, target in re.findall(r"!\[(.*)\]\((.+?)\)", text):
        assert len(words) > 20, target
        assert (page.parent / target).exists(), target


def test_each_plot_is_on_its_page() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in figures.RESULTS.glob("*.md"))
    for path in figures.RESULTS.glob("*.svg"):
        assert f"]({path.name})" in text


def test_index_compares_with_the_original_and_pytorch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    rows = [Measured("ours", [0.55]), Measured("original naive", [0.75])]
    group = Group("conv net", {"network": "conv"}, rows, "original naive", reference=0.5)
    report.save("iterations", "mpich", [group], [])
    report.write_index(["iterations", "exchange"])
    text = (tmp_path / "README.md").read_text()
    assert "[What does the exchange add to an iteration?](iterations.md)" in text
    assert "exchange.md" not in text  # which was not measured
    assert "| iterations: conv net | MPICH | 550 | 750 | - | 500 |" in text


def test_gigabit_carries_119_5_megabytes_per_second() -> None:
    assert link_seconds(119.55e6, 2) == pytest.approx(1, rel=1e-3)
    assert link_seconds(1, 1) == 0
