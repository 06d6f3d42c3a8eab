"""Measurements on GPUs, with made-up figures and timelines, because there is no GPU here."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from benchmarks import figures, gpu, graphs, harness, kernels, report
from benchmarks.collect import collect
from benchmarks.figures import Group, Measured
from benchmarks.gpu import COPIES, IDLE
from benchmarks.harness import Contestant, Place, Settings
from benchmarks.ranks import gpu_kernels
from chainer_fast.channels_last import layout
from chainer_fast.channels_last.kernels import Kernels
from chainermn.spans import MAIN, Span
from ci.gpu_proof import verdicts
from ci.gpu_proof.verdicts import FAILED, PROVED, Outcome


def spans(*of_gpu: tuple[str, int, int], stream: str = "GPU stream 1") -> list[Span]:
    found = [Span(name, stream, start, end) for name, start, end in of_gpu]
    return [Span("forward", MAIN, 0, 10**9), *found]


def first_iterations() -> list[Span]:
    """Return iterations that do not count, because the first ones compile kernels."""
    return spans(*(("forward", start, start) for start in range(-5, 0)))


def test_a_gpu_idles_while_no_stream_has_work() -> None:
    second = 10**9
    first = spans(
        ("forward", 0, 2 * second),
        ("backward", 2 * second, 4 * second),
        ("forward", 10 * second, 12 * second),
        ("backward", 12 * second, 99 * second),
    )
    # Another stream's work, half of it at the same time as the first's.
    first += spans(("copy", 3 * second, 5 * second), stream="GPU stream 2")
    # Meanwhile, the next batch arrives.
    first += spans(("data", 5 * second, 6 * second), ("convert", 6 * second, 9 * second))
    second_rank = spans(("forward", 0, 8 * second), ("forward", 8 * second, 9 * second))
    ranks = {0: first, 1: second_rank}
    seconds, idle = gpu.idle({rank: first_iterations() + of for rank, of in ranks.items()})
    assert seconds == [10, 8]
    assert idle == pytest.approx((50 + 0) / 2)


def test_a_timeline_without_a_gpu_is_no_measurement() -> None:
    with pytest.raises(RuntimeError, match="fewer than 7 iterations on a GPU"):
        gpu.idle({0: [Span("forward", MAIN, 0, 10)]})


def test_a_timeline_of_the_first_iterations_is_no_measurement() -> None:
    with pytest.raises(RuntimeError, match="fewer than 7 iterations on a GPU"):
        gpu.idle({0: first_iterations() + spans(("forward", 0, 1))})


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that fakes GPUs, and one second for every contestant."""

    def have(gpus: int) -> list[tuple[Place, list[Contestant]]]:
        taken: list[tuple[Place, list[Contestant]]] = []

        class Gpu:
            def devices(self) -> list[int]:
                return list(range(gpus))

        def take_turns(
            place: Place, found: list[Contestant], settings: Settings, **_: Any
        ) -> list[Measured]:
            taken.append((place, found))
            return [Measured(contestant.name, [1.0]) for contestant in found]

        monkeypatch.setattr("chainermn.transport.gpu.available.why_no_gpu", lambda: None)
        monkeypatch.setattr("chainermn.transport.gpu.available.why_no_nccl", lambda: None)
        monkeypatch.setattr("chainermn.transport.gpu.device.the_gpu", lambda: Gpu())
        for module in (gpu, graphs):
            monkeypatch.setattr(module, "take_turns", take_turns)
        monkeypatch.setattr(
            gpu, "record", lambda *_: {0: spans(("forward", 0, 1), ("forward", 2, 3))}
        )
        return taken

    return have


SETTINGS = Settings(1, True, "", "", lambda text: None)


def test_one_gpu_gives_no_figures_of_exchanges(machine: Any) -> None:
    taken = machine(1)
    found = list(gpu.measure(SETTINGS))
    titles = [group.title for group in found if isinstance(group, Group)]
    reasons = [reason for reason in found if isinstance(reason, str)]
    assert not any(title.startswith("exchange") for title in titles)
    assert "exchanges: there is one GPU, and an all-reduce of one rank moves nothing" in reasons
    names = [contestant.name for _, contestants in taken for contestant in contestants]
    assert not [name for name in names if "overlap" in name]
    options = [c.options for _, contestants in taken for c in contestants if c.team == "torch"]
    assert all(each["alone"] for each in options)


def test_two_gpus_are_measured_together(machine: Any) -> None:
    machine(2)
    titles = [group.title for group in gpu.measure(SETTINGS) if isinstance(group, Group)]
    of_two = [title for title in titles if title.endswith("one rank on each of 2 GPUs")]
    assert [title.split(",")[0] for title in of_two] == [
        *6 * ["iteration"],
        "idle GPU",
        *2 * ["exchange"],
    ]


def test_only_some_titles(machine: Any) -> None:
    machine(1)
    settings = dataclasses.replace(SETTINGS, only="gather")
    groups = [group for group in gpu.measure(settings) if isinstance(group, Group)]
    assert [group.title.split(",")[0] for group in groups] == 4 * ["gather and scatter"]
    assert groups[0].baseline == COPIES
    # Gathering and scattering each read 102.2 MB and write as many, all in one second.
    assert groups[0].rows[0].more["GB/s"] == pytest.approx(0.4089, abs=1e-4)
    assert groups[1].rows[0].more["GB/s"] == pytest.approx(0.3067, abs=1e-4)


def test_kernels_beside_copies(machine: Any) -> None:
    taken = machine(1)
    settings = dataclasses.replace(SETTINGS, only="kernel for channels last, bias")
    (group,) = [each for each in gpu.measure(settings) if isinstance(each, Group)]
    assert group.title == "kernel for channels last, bias, 112x112, 205.5 MB; one GPU"
    assert [row.name for row in group.rows] == ["ours", COPIES]
    assert group.baseline == COPIES
    # It reads and writes 102.8 MB, in one second; a copy of as many bytes moves as many.
    assert group.rows[0].more["GB/s"] == pytest.approx(0.2055, abs=1e-4)
    ((_, (_, copy)),) = taken
    assert copy.options == {"what": "copy", "n_bytes": 64 * 64 * 112 * 112 * 2}


@pytest.mark.parametrize("name", kernels.CASES)
def test_each_kernel_gets_the_arguments_that_it_takes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, called = kernels.CASES[name], mock.create_autospec(Kernels, instance=True)
    monkeypatch.setattr(gpu_kernels, "the_kernels", lambda: called)
    monkeypatch.setattr(gpu_kernels, "zeros", np.zeros)
    gpu_kernels.prepare(name)()
    ((method, arrays, options),) = called.method_calls
    assert method == case.method
    assert layout.as_stored(arrays[0]).flags.c_contiguous == (method != "padded")
    assert {each.nbytes / each.size for each in arrays} <= {1, 2}
    assert options.items() >= case.options.items()


def test_graphs_compete_with_all_that_pytorch_has(machine: Any) -> None:
    taken = machine(2)
    settings = dataclasses.replace(SETTINGS, only="graphs, conv net, mixed")
    (group,) = [each for each in gpu.measure(settings) if isinstance(each, Group)]
    assert group.title == "graphs, conv net, mixed precision, batch 64; one GPU"
    ((place, found),) = taken
    assert place.ranks == (1,)
    names = [contestant.name.replace(", with cuDNN", "") for contestant in found]
    assert names == [
        "ours",
        "ours, graphs",
        "PyTorch",
        "PyTorch, CUDA graph",
        "PyTorch, channels last",
        "PyTorch, channels last, CUDA graph",
        "PyTorch, channels last, compiled",
    ]
    teams = {contestant.team for contestant in found}
    assert len(teams) == 4, "memory is that of a process"


@pytest.mark.parametrize(
    ("network", "is_mixed", "has_cudnn", "layouts"),
    [
        ("conv", True, True, [", with cuDNN", ", with cuDNN, channels last"]),
        ("conv", False, True, [", with cuDNN"]),
        ("mlp", True, True, [", with cuDNN"]),
        ("conv", True, False, [""]),
    ],
)
def test_channels_last_is_for_convolutions_of_float16_by_cudnn(
    network: str, is_mixed: bool, has_cudnn: bool, layouts: list[str]
) -> None:
    found = graphs.ours({"network": network, "mixed": is_mixed}, has_cudnn=has_cudnn)
    assert [(c.name, c.options["graphs"]) for c in found] == [
        (f"ours{layout}{', graphs' * is_on}", is_on)
        for layout in layouts
        for is_on in (False, True)
    ]


def test_graphs_are_compared_with_the_fastest() -> None:
    rows = [Measured("ours", [1.0]), Measured("PyTorch", [3.0]), Measured("PyTorch, x", [2.0])]
    assert graphs.fastest_of([*rows, Measured("PyTorch, y")], "PyTorch") == "PyTorch, x"
    assert graphs.fastest_of(rows[:1], "PyTorch") == "ours"


def test_every_team_is_known(machine: Any) -> None:
    taken = machine(2)
    list(gpu.measure(SETTINGS))
    teams = {contestant.team for _, contestants in taken for contestant in contestants}
    assert teams <= harness.TEAMS.keys()


def test_the_page_has_verdicts_and_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    rows = [Measured("ours", [0.0012], {"GB/s": 340.0}), Measured(COPIES, [0.001])]
    report.save("gpu", "mpich", [Group("gather", {"what": "copies"}, rows, COPIES)], ["cuDNN: no"])
    gpu.write("gpu")
    before = (tmp_path / "gpu.md").read_text()
    assert "## What was proved with" not in before
    assert "| ChainerMN | 1.20 | 1.20-1.20 | 1.20 | 340.00 |" in before
    for mpi, task in (("openmpi", "Another"), ("mpich", "A")):
        (tmp_path / "raw" / gpu.VERDICTS.format(mpi=mpi)).write_text(f"| {task} task | proved |\n")
    gpu.write("gpu")
    text = (tmp_path / "gpu.md").read_text()
    assert text.endswith(
        "## What was proved with MPICH\n\n| A task | proved |\n\n\n"
        "## What was proved with Open MPI\n\n| Another task | proved |\n"
    )
    assert "## Figures" in text
    assert IDLE not in text


def test_results_of_several_runs_make_one_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(figures, "RESULTS", tmp_path / "results")
    runs = {
        "abc": [Outcome("a", "First", PROVED, 3), Outcome("b", "Second", note="no time was left")],
        "def": [Outcome("b", "Second", FAILED, failed=["test_it"])],
    }
    measured = {"abc": {"copies": 0.001, "idle": 0.002}, "def": {"idle": 0.003}}
    folders = []
    for commit, outcomes in runs.items():
        groups = [
            Group(title, {"what": title}, [Measured("ours", [seconds])], "ours")
            for title, seconds in measured[commit].items()
        ]
        report.save("gpu", "mpich", groups, [])
        folders.append(tmp_path / commit)
        folders[-1].mkdir()
        shutil.move(tmp_path / "results/raw/gpu-mpich.json", folders[-1])
        about = {"date": "today", "commit": commit, "machine": ["GPU: one"], "command": "prove"}
        verdicts.save(folders[-1] / "verdicts.json", about, outcomes)
    collect(folders)
    text = (tmp_path / "results/gpu.md").read_text()
    assert "| First | proved | 3 | 0 | 0 | 0 | at commit abc |" in text
    assert "| Second | **failed** | 0 | 1 | 0 | 0 | `test_it` |" in text
    # The last of each, with its commit, whatever git said where it was measured.
    assert "; commit def." in text
    copies, idle = text.split("### ")[1:]
    assert "| ChainerMN | 1.00 | 1.00-1.00 | 1.00 |" in copies
    assert "- At commit abc." in copies
    assert "| ChainerMN | 3.00 | 3.00-3.00 | 1.00 |" in idle
    assert "At commit" not in idle
    assert "with Open MPI" not in text
    with_openmpi = tmp_path / "openmpi"
    with_openmpi.mkdir()
    machine = ["GPU: one", "packages: numpy 2; openmpi 5.0; mpi4py 4"]
    outcomes = [Outcome("a", "First", PROVED, 7)]
    about["command"] = "prove with it"
    verdicts.save(with_openmpi / "verdicts.json", {**about, "machine": machine}, outcomes)
    collect([*folders, with_openmpi])
    before, after = (tmp_path / "results/gpu.md").read_text().split("with Open MPI\n")
    assert before.startswith(text)
    assert "\n    prove with it\n" in after
    assert after.endswith("| First | proved | 7 | 0 | 0 | 0 |  |\n")
    with pytest.raises(SystemExit, match=r"no verdicts\.json in /no/such/folder"):
        collect([*folders, Path("/no/such/folder")])
    verdicts.save(folders[0] / "verdicts.json", {**about, "machine": ["GPU: other"]}, [])
    with pytest.raises(SystemExit, match="these runs had GPU: one; GPU: other"):
        collect(folders)
