"""Tables, ratios and targets from figures that are made up."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks import model, report, summary
from benchmarks.__main__ import write_all
from benchmarks.harness import SENT, Measured
from benchmarks.link import wire_bytes
from benchmarks.networks import GRADIENT_BYTES
from benchmarks.report import Group


@pytest.fixture
def group() -> Group:
    rows = [
        Measured("ours", [0.010, 0.020, 0.040], {SENT: 1.5}),
        Measured("original", [0.020, 0.050, 0.060]),
        Measured("absent", skipped="ValueError: not here"),
    ]
    return Group("iterations of a net", {"network": "net"}, rows, "original", 0.005, "the least")


def test_ratios_are_those_of_a_round(group: Group) -> None:
    assert group.ratio("ours") == pytest.approx(0.5)  # of 0.5, 0.4 and 0.67
    assert group.ratio("original", "ours") == pytest.approx(2)
    assert group.ratio("absent") is None
    assert group.ratio("never heard of") is None


def test_table_has_medians_spread_ratios_and_reasons(group: Group) -> None:
    text = "\n".join(report.table(group))
    assert "| ours | 20.0 | 10.0-40.0 | 0.50 | 4.00 | 1.50 |" in text
    assert "| original | 50.0 | 20.0-60.0 | 1.00 | 10.00 |  |" in text
    assert "- 3 turns each." in text
    assert "- The reference is the least." in text
    assert "- absent: ValueError: not here" in text


def test_what_is_saved_is_loaded_and_written(
    group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    report.save("exchange", "mpich", [group], ["PyTorch: it is not installed"])
    loaded = report.load("exchange")["mpich"]
    assert loaded["groups"] == [group]
    about = loaded["about"]
    assert set(about) == {"date", "machine", "versions", "commit", "command"}
    assert "exchange" in about["command"]

    other = Group("another net", {"network": "other"}, [Measured("ours", [1.0])], "ours")
    report.save("exchange", "mpich", [other], [])  # only a part of it
    assert {g.title for g in report.load("exchange")["mpich"]["groups"]} == {
        group.title,
        other.title,
    }

    report.write("exchange", "Exchanges", "As they are.")
    text = (tmp_path / "exchange.md").read_text()
    assert text.startswith("# Exchanges\n\nAs they are.")
    assert "## MPICH" in text
    assert (tmp_path / "exchange.png").stat().st_size > 1000
    assert json.loads((tmp_path / "raw/exchange-mpich.json").read_text())


def test_pages_are_those_of_the_raw_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``python -m benchmarks --write`` makes them so."""
    monkeypatch.setattr(report, "draw", lambda *_: None)
    monkeypatch.setattr(model, "draw", lambda *_: None)
    results = report.RESULTS
    shutil.copytree(results / "raw", tmp_path / "raw")
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    write_all()
    written = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.md")}
    assert written == {
        path.name: path.read_text(encoding="utf-8") for path in results.glob("*.md")
    }


def test_targets_are_met_or_not() -> None:
    rows = [
        Measured("ours", [0.55], {SENT: 1.01 * wire_bytes(GRADIENT_BYTES["conv"], 2) / 1e6}),
        Measured("ours, float16", [0.50]),
        Measured("original naive", [0.75]),
    ]
    key = {"network": "conv", "place": summary.TWO_HOSTS}
    group = Group("conv net", key, rows, "original naive", reference=0.5)
    found = {
        target.text.split(": ")[1]: target for target in summary.targets_of_iterations([group])
    }
    assert found["ours / (forward + max(backward, link))"].value == pytest.approx(1.1)
    assert not found["original / ours"].met
    assert found["original / ours"].value == pytest.approx(0.75 / 0.55)
    assert not found["original / ours, float16"].met
    assert found["bytes on the wire / least, ours"].met
    assert "bytes on the wire / least, ours, float16" not in found  # which were not counted


def test_summary_names_what_has_not_been_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path / "new")
    summary.write()
    text = (tmp_path / "new/README.md").read_text()
    assert "| start-up | not yet |" in text
