"""Plots can be read on a phone, in both themes, and show what was measured."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import figures, plots
from benchmarks.figures import Group, Measured

SVG = "{http://www.w3.org/2000/svg}"
PLOTS = sorted(figures.RESULTS.glob("*.svg"))
#: Pixels that a page leaves for a plot on a phone 390 pixels wide.
PHONE = 360
#: Backgrounds of the site.
LIGHT, DARK = "#ffffff", "#131416"


def texts(path: Path) -> list[tuple[str, float]]:
    """Return all texts of a plot, with their sizes in its units."""
    found = []
    for text in ElementTree.parse(path).iter(f"{SVG}text"):
        size = re.search(r"(?:font-size|font): [^;]*?([\d.]+)px", text.get("style", ""))
        assert size, text.attrib
        found.append(("".join(text.itertext()), float(size[1])))
    return found


@pytest.mark.parametrize("path", PLOTS, ids=lambda path: path.stem)
def test_a_plot_can_be_read_on_a_phone(path: Path) -> None:
    root = ElementTree.parse(path).getroot()
    width = float(root.attrib["viewBox"].split()[2])
    assert min(size for _, size in texts(path)) * PHONE / width >= 9
    panels = [group for group in root.iter(f"{SVG}g") if group.get("id", "").startswith("axes")]
    assert 1 <= len(panels) <= 4


@pytest.mark.parametrize("path", PLOTS, ids=lambda path: path.stem)
def test_a_plot_has_the_text_color_of_the_page(path: Path) -> None:
    written = path.read_text(encoding="utf-8")
    assert "prefers-color-scheme:dark" in written
    colors = set(re.findall(r"(?:fill|stroke): (#\w+|[a-z]+)", written, re.IGNORECASE))
    chosen = {plots.OURS, plots.PYTORCH, plots.MPI, plots.ORIGINAL}
    assert colors <= chosen | {"currentColor", "none", "#ffffff"}  # white: on bars


def contrast(color: str, other: str) -> float:
    """Return the ratio of luminances, as the Web Content Accessibility Guidelines define it."""

    def luminance(color: str) -> float:
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    darker, lighter = sorted(map(luminance, (color, other)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("color", [plots.OURS, plots.PYTORCH, plots.MPI, plots.ORIGINAL])
def test_bars_stand_out_from_both_backgrounds(color: str) -> None:
    assert contrast(color, LIGHT) >= 3  # the guidelines' minimum for graphics
    assert contrast(color, DARK) >= 3


def test_a_contestant_has_one_color() -> None:
    assert plots.color_of("ours default") == plots.color_of("Chainer, oneDNN") == plots.OURS
    assert plots.color_of("PyTorch gloo") == plots.color_of("PyTorch") == plots.PYTORCH
    assert plots.color_of("original naive") == plots.color_of("original") == plots.ORIGINAL


@pytest.fixture
def group() -> Group:
    rows = [
        Measured("ours", [0.2, 0.1, 0.4]),
        Measured("ours, no exchange", [0.05]),
        Measured("PyTorch", []),
    ]
    return Group("a net", {}, rows, "ours")


def test_bars_have_medians_their_ends_and_the_part_without_an_exchange(group: Group) -> None:
    rows = {"ChainerMN": "ours", "PyTorch": "PyTorch"}
    (bar,) = plots.times(group, rows, {"ChainerMN": "ours, no exchange"})
    assert bar == plots.Bar("ChainerMN", 200, plots.OURS, "200", (100, 400), 50)


def test_a_plot_shows_titles_labels_values_and_the_caption(
    group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    panels = plots.panel("A net", plots.times(group, {"ChainerMN": "ours"}), 0.3)
    assert panels[0].reference == 300
    plots.draw("a", panels, "ms; less is better\ndashed: the link")
    shown = [text for text, _ in texts(tmp_path / "a.svg")]
    assert sorted(shown) == ["200", "A net", "ChainerMN", "dashed: the link", "ms; less is better"]
    first = (tmp_path / "a.svg").read_text()
    plots.draw("a", panels, "ms; less is better\ndashed: the link")
    assert (tmp_path / "a.svg").read_text() == first


def test_without_a_measurement_there_is_no_plot(
    group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    plots.draw("a", plots.panel("A net", plots.times(group, {"PyTorch": "PyTorch"})), "ms")
    assert not (tmp_path / "a.svg").exists()
