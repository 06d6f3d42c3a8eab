"""On GPUs: copies of gradients, kernels, whole iterations, idle time, and exchanges."""

from __future__ import annotations

import importlib.util
import itertools
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import figures, graphs, plots, report
from benchmarks.figures import Group, Measured
from benchmarks.harness import REPOSITORY, Contestant, Place, Settings, take_turns, why_no_torch
from benchmarks.kernels import CASES as CASES_OF_KERNELS
from benchmarks.networks import GRADIENT_BYTES, MIXED, SINGLE, TITLES
from chainermn.communicators import registered
from chainermn.launch.mpiexec import NAMES
from chainermn.spans import Span

#: Files with the verdicts of ``ci/prove_on_gpu.py`` for each MPI, beside the raw figures.
VERDICTS = "proof_on_gpu-{mpi}.md"
#: Networks, batch sizes and precisions. With small batches, the host limits the speed.
CASES = (
    ("conv", 64, SINGLE),
    ("conv", 64, MIXED),
    ("conv", 1024, MIXED),
    ("resnet50", 64, SINGLE),
    ("resnet50", 64, MIXED),
    ("resnet50", 256, MIXED),
)
COMMUNICATORS = sorted(registered().keys() - {"dummy"})
WIRES = {"float32": 4, "float16": 2}
COPIES = "copies of as many bytes"
IDLE = "GPU idle, %"
# How the recorded trainings differ: options of benchmarks/ranks/recorded.py.
UPDATERS: dict[str, list[str]] = {
    "ours, StandardUpdater": [],
    "ours, prefetch_to_device": ["prefetch"],
}
_SECONDS, _TIMES_ROUNDS = 0.4, 4
_LIMIT = 150.0  # seconds for a recorded training
_ITERATIONS = 40
# In these, kernels are compiled and cuDNN chooses its algorithms.
_FIRST_ITERATIONS = 5
# In these phases the host prepares a batch and copies it to the GPU.
_WITHOUT_KERNELS = {"data", "convert"}


def measure(settings: Settings) -> Iterator[Group | str]:
    """Yield groups, and for anything that could not be measured, the reason."""
    from chainermn.transport.gpu.available import why_no_gpu, why_no_nccl
    from chainermn.transport.gpu.device import the_gpu

    if reason := why_no_gpu() or why_no_nccl():
        yield f"anything on a GPU: {reason}"
        return
    gpus = len(the_gpu().devices())
    yield from copies(settings)
    yield from kernels(settings)
    yield from graphs.measure(settings, has_cudnn=has_cudnn())
    place = Place(f"one rank on each of {gpus} GPUs" if gpus > 1 else "one GPU", (gpus,))
    for network, batch, precision in CASES:
        title = f"iteration, {TITLES[network]}, {precision}, batch {batch}; {place.title}"
        if settings.wants(title):
            key = {"network": network, "what": "iteration"}
            key |= {"precision": precision, "batch": str(batch)}
            found = iterations(network, batch, gpus, is_mixed=precision == MIXED)
            rows = take_turns(place, found, settings, seconds=_SECONDS)
            for row in rows:
                if row.seconds:
                    row.more["images/s per GPU"] = batch / row.median
            yield Group(title, key, rows, baseline_of(rows, "PyTorch"))
    yield from recorded(settings, place)
    if gpus > 1:
        yield from exchanges(settings, place)
    else:
        yield "exchanges: there is one GPU, and an all-reduce of one rank moves nothing"
    yield from why_no_torch()
    if not has_cudnn():
        yield "cuDNN: it is not installed; pip install nvidia-cudnn-frontend"


def has_cudnn() -> bool:
    return importlib.util.find_spec("cudnn") is not None


def baseline_of(rows: Sequence[Measured], name: str) -> str:
    """Return the name of a row if it was measured, else the name of the first row."""
    return name if any(row.name == name and row.seconds for row in rows) else rows[0].name


def copies(settings: Settings) -> Iterator[Group]:
    """Yield times of gathering and scattering gradients, beside copies of as many bytes."""
    for network in ("resnet50", "mlp"):
        for wire, itemsize in WIRES.items():
            size = f"{GRADIENT_BYTES[network] / 1e6:.1f} MB"
            title = f"gather and scatter, {TITLES[network]}, {size}, by {wire}"
            options = {"network": network, "wire": wire}
            found = [
                Contestant("ours", "copies on a GPU", {"what": "gather and scatter", **options}),
                Contestant(COPIES, "copies on a GPU", {"what": "copies", **options}),
            ]
            # Gradients and the buffer are each read and written once.
            moved = 2 * GRADIENT_BYTES[network] * (1 + itemsize / 4)
            yield from beside_copies(title, {"what": "copies", **options}, found, moved, settings)


def kernels(settings: Settings) -> Iterator[Group]:
    """Yield times of kernels for channels-last images, beside copies of as many bytes."""
    for name, case in CASES_OF_KERNELS.items():
        title = f"kernel for channels last, {name}, {case.moved / 1e6:.1f} MB"
        found = [
            Contestant("ours", "kernels on a GPU", {"what": "kernel", "name": name}),
            # Which reads and writes each byte.
            Contestant(COPIES, "kernels on a GPU", {"what": "copy", "n_bytes": case.moved // 2}),
        ]
        yield from beside_copies(
            title, {"what": "kernel", "name": name}, found, case.moved, settings
        )


def beside_copies(
    title: str,
    key: dict[str, str],
    found: Sequence[Contestant],
    moved: float,
    settings: Settings,
) -> Iterator[Group]:
    """Yield a table of work on one GPU that moves this many bytes, if it is wanted."""
    place = Place("one GPU", (1,))
    title = f"{title}; {place.title}"
    if not settings.wants(title):
        return
    # Each turn repeats the work many times.
    rows = take_turns(place, found, settings, seconds=0, rounds=_TIMES_ROUNDS * settings.rounds)
    for row in rows:
        if row.seconds:
            row.more["GB/s"] = moved / row.median / 1e9
    yield Group(title, key, rows, COPIES)


def iterations(network: str, batch: int, gpus: int, *, is_mixed: bool) -> list[Contestant]:
    """Return all contestants that train a network. On one GPU, none exchanges."""
    options = {"what": "iteration", "network": network, "batchsize": batch}
    options |= {"on_gpu": True, "mixed": is_mixed}
    ours, alone = {**options, "communicator": None}, {**options, "alone": gpus == 1}
    found = []
    if has_cudnn():
        found.append(Contestant("ours, with cuDNN", "with cuDNN", ours))
        if gpus > 1:
            overlapped = {**ours, "overlap": True}
            found.append(Contestant("ours, with cuDNN, overlap on", "with cuDNN", overlapped))
    found.append(Contestant("ours", "ours", ours))
    found.append(Contestant("PyTorch", "torch", alone))
    if is_mixed:
        found.append(Contestant("PyTorch, channels last", "torch", {**alone, "channels_last": 1}))
    return found


def recorded(settings: Settings, place: Place) -> Iterator[Group]:
    """Yield how long the GPUs idle in a training, whose timeline is kept."""
    network, batch, _ = CASES[-1]
    title = f"idle GPU, {TITLES[network]}, mixed precision, batch {batch}; {place.title}"
    if not settings.wants(title):
        return
    rows = []
    for name, options in UPDATERS.items():
        settings.tell(f"{title}: {name}")
        rows.append(row := Measured(name))
        try:
            file = "-".join(["gpu", network, *options]) + ".timeline.gz"
            spans = record(place, network, batch, figures.RESULTS / "raw" / file, options)
            row.seconds, row.more[IDLE] = idle(spans)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            row.skipped = str(error)
    notes = [
        "Idle: no stream is in forward, backward, the exchange or the optimizer. Gaps between "
        "their kernels do not count.",
        f"Without the first {_FIRST_ITERATIONS} iterations.",
    ]
    yield Group(title, {"network": network, "what": "idle"}, rows, rows[0].name, notes=notes)


def record(
    place: Place, network: str, batch: int, file: Path, options: Sequence[str] = ()
) -> Mapping[int, Sequence[Span]]:
    """Train with a timeline. Return the spans of each rank and its GPU."""
    from chainermn.profiling.timeline import trace

    file.parent.mkdir(parents=True, exist_ok=True)
    cudnn = "1" if has_cudnn() else "0"
    with tempfile.TemporaryFile() as log:
        arguments = ["-m", "benchmarks.ranks.recorded", str(file), network, str(batch)]
        ended = subprocess.run(
            place.command(
                [sys.executable, *arguments, str(_ITERATIONS), *options], ["CHAINER_COMPAT_CUDNN"]
            ),
            cwd=REPOSITORY,
            env={**place.environment(), "CHAINER_COMPAT_CUDNN": cudnn},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            timeout=_LIMIT,
        )
        if ended.returncode != 0:
            log.seek(0)
            raise RuntimeError(log.read().decode(errors="replace")[-2000:])
    return trace.read(file).spans


def idle(tracks: Mapping[int, Iterable[Span]]) -> tuple[list[float], float]:
    """Return seconds of each iteration, and the share of the time that a GPU idles, in %.

    A GPU idles while no stream has work of an update. Preparing a batch is no such work. The share
    is the mean over the ranks. The first iterations do not count.
    """
    seconds: list[float] = []
    shares = []
    for spans in tracks.values():
        of_gpu = [
            span
            for span in spans
            if span.track.startswith("GPU stream") and span.name not in _WITHOUT_KERNELS
        ]
        starts = sorted(span.start for span in of_gpu if span.name == "forward")
        starts = starts[_FIRST_ITERATIONS:]
        if len(starts) < 2:
            raise RuntimeError(
                f"the timeline has fewer than {_FIRST_ITERATIONS + 2} iterations on a GPU"
            )
        seconds += [(end - start) / 1e9 for start, end in itertools.pairwise(starts)]
        busy, reached = 0, starts[0]
        for start, end in sorted((span.start, span.end) for span in of_gpu):
            end = min(end, starts[-1])
            busy += max(0, end - max(start, reached))
            reached = max(reached, end)
        shares.append(100 * (1 - busy / (starts[-1] - starts[0])))
    return seconds, sum(shares) / len(shares)


def exchanges(settings: Settings, place: Place) -> Iterator[Group]:
    """Yield exchanges of gradients with all communicators."""
    for network in dict.fromkeys(network for network, *_ in CASES):
        size = f"{GRADIENT_BYTES[network] / 1e6:.1f} MB"
        title = f"exchange, {TITLES[network]}, {size}; {place.title}"
        if not settings.wants(title):
            continue
        options: dict[str, Any] = {"what": "exchange", "network": network, "on_gpu": True}
        found = [
            Contestant(f"ours {name or 'default'}", "ours", {**options, "communicator": name})
            for name in (None, *COMMUNICATORS)
        ]
        found.append(Contestant("PyTorch NCCL", "torch", options))
        rows = take_turns(place, found, settings, seconds=_SECONDS)
        yield Group(title, {"network": network, "what": "exchange"}, rows, found[0].name)


def write(part: str) -> None:
    """Write the page: figures, then verdicts."""
    lines = []
    for content in figures.load(part).values():
        lines += ["", "## Figures", "", *report.describe_run(content)]
        for group in content["groups"]:
            lines += ["", f"### {group.title}", "", *report.table(group)]
    for mpi in report.MPIS:
        path = figures.RESULTS / "raw" / VERDICTS.format(mpi=mpi)
        if path.exists():
            lines += ["", f"## What was proved with {NAMES[mpi]}", "", path.read_text("utf-8")]
    report.write_page(part, lines)


def draw() -> None:
    """Draw how much longer an iteration takes than PyTorch's."""
    rows = {"ours, with cuDNN": "", "PyTorch, channels last": "... channels last"}
    for content in figures.load("gpu").values():
        panels: list[plots.Panel] = []
        for network in ("resnet50", "conv"):
            bars = []
            for case, batch, precision in CASES:
                key = {"network": network, "batch": str(batch), "precision": precision}
                group = figures.find(content, what="iteration", **key)
                short = precision.partition(" ")[0]
                for row, label in rows.items():
                    ratio = group.ratio(row, "PyTorch")
                    if case == network and ratio is not None:
                        label = label or f"{short}, batch {batch}"
                        bars.append(plots.Bar(label, ratio, plots.color_of(row), f"{ratio:.2f}"))
            if bars:
                panels.append(plots.Panel(f"{TITLES[network]}, one GPU", bars, reference=1))
        plots.draw(
            "gpu",
            panels,
            "time of an iteration as a multiple of PyTorch's (dashed)\n"
            "less is better; blue: ChainerMN with cuDNN\n"
            "orange: PyTorch with channels last",
        )
