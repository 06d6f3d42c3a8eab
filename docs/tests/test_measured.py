"""Figures on the pages are those of the benchmarks, and support the advice beside them."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import asdict

import pages
import pytest

from benchmarks import figures, quotes
from benchmarks.figures import Group, Measured


def group(title, **rows):
    return asdict(Group(title, {}, [Measured(*row) for row in rows.items()], ""))


@pytest.fixture
def raw(tmp_path, monkeypatch):
    nets = [group("a net; two hosts", ours=[0.2, 0.4, 0.1], other=[0.1, 0.1, 0.1])]
    nets.append(group("a net; one host", ours=[0.05], other=[]))
    (tmp_path / "raw").mkdir()
    files = {"steps-mpich": nets, "steps-openmpi": [group("a net; two hosts", ours=[0.3456])]}
    for name, groups in files.items():
        (tmp_path / f"raw/{name}.json").write_text(json.dumps({"groups": groups}))
    monkeypatch.setattr(figures, "RESULTS", tmp_path)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("steps-mpich: two hosts: ours", "200 ms"),
        ("steps-mpich: one host: a net: ours", "50.0 ms"),
        ("steps: two hosts: ours", "200 to 346 ms"),
        ("steps: ours", "50.0 to 346 ms"),
        ("steps-mpich: two hosts: ours / other", "2.00"),  # the median of 2, 4 and 1
    ],
)
def test_a_figure_is_a_median_or_from_least_to_greatest(raw, name, expected):
    assert figures.figure(name) == expected


@pytest.mark.parametrize(
    "name",
    [
        "step: ours",
        "steps: three hosts: ours",
        "steps-mpich: two hosts: theirs",
        "steps-mpich: one host: ours / other",
    ],
)
def test_what_was_not_measured_is_an_error(raw, name):
    with pytest.raises(ValueError, match=r"has no table|has not been measured"):
        figures.figure(name)


@pytest.fixture
def slow(raw, tmp_path):
    sent = [0.0, 100.0, 50.0, 0.88]
    names = ["ours, no exchange", "ours, overlap on", "ours, bfloat16", "ours, PowerSGD, rank 2"]
    turns = [[0.2, 0.2], [0.4, 0.6], [], [0.2, 0.22]]
    rows = [
        Measured(name, seconds, {"MB sent per host": megabytes})
        for name, seconds, megabytes in zip(names, turns, sent, strict=True)
    ]
    links = [Group("a net, slow", {"network": "resnet50"}, rows, names[0])]
    curves = {"exact means": [[0.5, 0.91], [0.6, 0.93]], "PowerSGD, rank 2": [[0.9], [0.91]]}
    rows = [Measured(name, [1.0, 1.0], {}, of_seeds) for name, of_seeds in curves.items()]
    apps = [Group("an app", {"app": "mnist"}, rows, "exact means")]
    for name, groups in {"slow-mpich": links, "convergence-mpich": apps}.items():
        content = {"groups": [asdict(group) for group in groups]}
        (tmp_path / f"raw/{name}.json").write_text(json.dumps(content))


def test_table_of_accuracy_has_means_of_seeds_and_their_ends(slow):
    head, _, *rows = quotes.table("accuracy")
    assert head == "| setting | MB of ResNet-50 | mnist, % |"
    assert rows[0] == "| float32 | 100 | 92.0 (91.0 to 93.0) |"
    assert rows[1] == "| `PowerSGD(rank=2)` | 0.88 | 90.5 (90.0 to 91.0) |"
    assert len(rows) == 2


def test_table_of_the_pipeline_has_idle_shares(raw, tmp_path):
    rows = [Measured("1 rank", [1.0]), Measured("2 ranks, m = 4", [0.625], {"idle, %": 21.4})]
    rows[1].more["in theory, %"] = 20.0
    content = {"groups": [asdict(Group("a batch", {}, rows, "1 rank"))]}
    (tmp_path / "raw/pipeline-mpich.json").write_text(json.dumps(content))
    _, _, *rows = quotes.table("pipeline")
    assert rows == ["| 4 | 0.62 | 21 % | 20 % |"]


def test_quotes_on_pages_are_what_was_measured():
    texts = {page: pages.read(page) for page in quotes.pages()}
    assert sum(len(figures.QUOTE.findall(text)) for text in texts.values()) > 10
    old = [page.name for page, text in texts.items() if quotes.updated(text) != text]
    assert old == [], "write them again: python -m benchmarks --write"


def test_a_new_quote_needs_only_its_comment(raw):
    figure = "It took <!-- measured: steps-mpich: two hosts: ours --> here."
    assert quotes.updated(figure).startswith("It took 200 ms<!-- measured: steps-mpich:")
    assert quotes.updated(quotes.updated(figure)) == quotes.updated(figure)


def test_no_page_has_a_measured_figure_of_its_own():
    """Times, percentages and factors come from the results, or are quoted as code."""
    block = re.compile(r"^( *)(`{3,}).*?^\1\2", re.DOTALL | re.MULTILINE)
    own = []
    for page in (page for page in pages.PAGES if "design" not in page.parts):
        prose = block.sub("", pages.read(page))
        for quoted in (quotes.TABLE, figures.QUOTE, re.compile(r"`[^`\n]+`")):
            prose = quoted.sub("", prose)
        found = re.findall(r"\d[\d.,]*\s?(?:ms|µs|%)(?!\w)|\d[\d.,]* times\b", prose)
        own += [f"{page.name}: {figure}" for figure in found]
    assert own == []


#: Claims and advice of the pages, as ratios of times below or above 1.
ADVICE = {
    "exchange: ResNet-50: 2 ranks, one host: ours default / original naive": "less",
    "exchange: ResNet-50: 2 ranks, one host: ours default / MPI_Allreduce": "less",
    "exchange: ResNet-50: 2 ranks, one host: ours default / PyTorch gloo": "less",
    "exchange-openmpi: ResNet-50: two hosts: ours default / original naive": "less",
    "exchange-openmpi: ResNet-50: two hosts: ours default / PyTorch gloo": "more",
    "iterations: conv net: two hosts: ours / original naive": "less",
    "iterations: ResNet-50: two hosts: ours / original naive": "less",
    "compute: conv net: Chainer, oneDNN / PyTorch": "less",
    "compute: ResNet-50: Chainer, oneDNN / PyTorch": "less",
    "gpu: iteration: mixed: PyTorch, channels last / PyTorch": "less",
    "scale: create_communicator; 8 : ours / original": "more",
    "scale: create_communicator; 128: ours / original": "less",
    "scatter: arrays: ours / original": "less",
    "iterations-mpich: conv net: two hosts: ours, overlap on / ours, overlap off": "less",
    "iterations: conv net: one host: ours, overlap on / ours, overlap off": "more",
    "iterations: MLP: two hosts: ours, bfloat16 / ours": "less",
    "iterations: conv net: two hosts: ours, bfloat16 / ours": "less",
    "iterations-mpich: MLP: two hosts: ours, double buffering / ours": "less",
    "iterations-mpich: MLP: two hosts: ours, bfloat16 / ours, double buffering": "less",
    "iterations-mpich: conv net: two hosts: ours, double buffering / ours": "more",
    "iterations-mpich: ResNet-50: two hosts: ours, double buffering / ours": "more",
    "iterations: conv net: one host: original naive, threads left alone / original naive": "more",
    "slow: two hosts: ours, PowerSGD, rank 4 / ours, overlap on": "less",
    "slow: two hosts: ours, PowerSGD, rank 4 / ours, bfloat16": "less",
    "slow: two hosts: ours, PowerSGD, rank 4 / PyTorch DDP": "less",
    "slow: two hosts: 100 Mbit/s: ours, accumulate 8 / ours, overlap on": "less",
    "pipeline: 2 ranks, m = 2 / 1 rank on 1 core": "less",
    "pipeline: 2 ranks, m = 4 / 2 ranks, m = 2": "less",
    "pipeline: 2 ranks, m = 1 / 1 rank on 1 core": "more",
    "exchange: 2 ranks, one host: ours flat / ours single_node": "more",
    "exchange: 4 ranks, two hosts: ours two_dimensional / ours naive": "less",
    "gpu: iteration: ResNet-50: ours, with cuDNN / ours": "less",
    "gpu: conv net: mixed: batch 64: ours, with cuDNN / ours": "more",
    "gpu: conv net: mixed: batch 1024: ours, with cuDNN / ours": "less",
    "gpu: iteration: ours, with cuDNN / PyTorch": "more",
    "gpu: iteration: ResNet-50: batch 256: PyTorch, channels last / PyTorch": "less",
}


@pytest.mark.parametrize("name", ADVICE)
def test_advice_follows_from_what_was_measured(name):
    ratios = [float(end) for end in figures.figure(name).split(" to ")]
    assert max(ratios) < 1 if ADVICE[name] == "less" else min(ratios) > 1


@pytest.mark.parametrize(
    "setting",
    [
        "bfloat16",
        "PowerSGD, rank 4, from step 100",
        "LocalSGD, period 8, from step 100",
        "Quantization, 8 bits",
    ],
)
def test_what_is_advised_loses_no_more_than_another_seed_changes(setting):
    (content,) = figures.load("convergence").values()
    assert len(content["groups"]) == 3
    for group in content["groups"]:
        exact, found = group.row(group.baseline).last, group.row(setting).last
        assert len(found) == len(exact) == 3
        assert statistics.fmean(exact) - statistics.fmean(found) <= max(exact) - min(exact)
