"""When each rank of a pipeline computes, and when it waits.

mpiexec -n 2 python pipeline_chart.py [--micro-batches 1 2 4 8] [--out result]

All ranks have to be on one host, whose clock they read, with a core for each. It prints how long a
batch takes and how much of that the ranks are idle, for each number of micro-batches, and writes
pipeline.png and pipeline.json into --out.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import chainer
import numpy as np
from pipeline import backprop, check_micro_batches, make_batch, make_model, make_stage

import chainermn
from chainermn.agreement import exit_together

#: Of one rank: direction, micro-batch, begin and end in seconds, in the order of time.
Spans: TypeAlias = list[tuple[str, int, float, float]]


class Clock(chainer.FunctionHook):
    """Notes when this rank computes; the messages between its micro-batches are not computing."""

    name = "Clock"

    def __init__(self) -> None:
        self.spans: list[tuple[str, float, float]] = []
        self._depth = 0
        self._goes_on = False

    def forward_preprocess(self, function: chainer.FunctionNode, *_: object) -> None:
        if self._depth == 0:
            self._begin = time.perf_counter()
        self._depth += 1  # the backward of a function applies others

    backward_preprocess = forward_preprocess

    def forward_postprocess(self, function: chainer.FunctionNode, *_: object) -> None:
        self._end("forward", function)

    def backward_postprocess(self, function: chainer.FunctionNode, *_: object) -> None:
        self._end("backward", function)

    def _end(self, direction: str, function: chainer.FunctionNode) -> None:
        self._depth -= 1
        if self._depth == 0:
            is_message = function.label.startswith(("Send", "Recv"))
            if not is_message:
                goes_on = self._goes_on and self.spans[-1][0] == direction
                begin = self.spans.pop()[1] if goes_on else self._begin
                self.spans.append((direction, begin, time.perf_counter()))
            self._goes_on = not is_message


def measure(
    model: chainer.Link, x: np.ndarray, t: np.ndarray, micro_batches: int
) -> list[Spans] | None:
    """Backpropagate a batch; return on rank 0 when each rank has computed."""
    comm = model.comm
    comm.allgather_obj(None)  # all begin at the same time
    with Clock() as clock:
        backprop(model, x, t, micro_batches)
    numbers = {"forward": iter(range(micro_batches))}
    numbers["backward"] = iter(reversed(range(micro_batches)))
    spans = [(direction, next(numbers[direction]), *span) for direction, *span in clock.spans]
    return comm.gather_obj(spans)


def duration(ranks: Sequence[Spans]) -> float:
    """Return the seconds from when the first rank begins until the last one ends."""
    ends = [(begin, end) for spans in ranks for *_, begin, end in spans]
    return max(end for _, end in ends) - min(begin for begin, _ in ends)


def idle_share(ranks: Sequence[Spans]) -> float:
    """Return the part of this time in which ranks do not compute."""
    busy = sum(end - begin for spans in ranks for *_, begin, end in spans)
    return 1 - busy / (len(ranks) * duration(ranks))


def idle_share_in_theory(ranks: int, micro_batches: int) -> float:
    """Return what it would be if all took equally long and messages no time."""
    return (ranks - 1) / (micro_batches + ranks - 1)


def draw(charts: Mapping[int, Sequence[Spans]], file: Path) -> None:
    """Draw the computation of every rank, for some numbers of micro-batches."""
    from matplotlib import pyplot

    n_ranks = len(next(iter(charts.values())))
    size = (8, len(charts) * (0.35 * n_ranks + 0.5) + 0.4)
    figure, axes = pyplot.subplots(len(charts), 1, figsize=size, sharex=True, squeeze=False)
    colors = {"forward": "tab:blue", "backward": "tab:orange"}
    for axis, (micro_batches, ranks) in zip(axes.flat, charts.items(), strict=True):
        start = min(spans[0][2] for spans in ranks)
        for rank, spans in enumerate(ranks):
            axis.barh(rank, 1e3 * duration(ranks), color="gainsboro", height=0.8)
            for direction, number, begin, end in spans:
                left, width = 1e3 * (begin - start), 1e3 * (end - begin)
                axis.barh(
                    rank, width, left=left, height=0.8, color=colors[direction], edgecolor="white"
                )
                axis.text(left + width / 2, rank, number, ha="center", va="center", fontsize=7)
        axis.set_yticks(range(n_ranks), [f"rank {rank}" for rank in range(n_ranks)], fontsize=8)
        axis.invert_yaxis()
        axis.set_title(
            f"micro-batches: {micro_batches}; idle: {idle_share(ranks):.0%}, "
            f"in theory: {idle_share_in_theory(n_ranks, micro_batches):.0%}",
            fontsize=8,
        )
        axis.tick_params(labelsize=8)
        axis.spines[:].set_visible(False)
    axes.flat[-1].set_xlabel("ms; blue: forward, orange: backward, gray: idle", fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=100)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--batchsize", type=int, default=64)
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("result"))
    args = parser.parse_args()
    comm = chainermn.create_communicator()
    with exit_together(comm):
        if comm.size == 1:
            raise ValueError("a pipeline needs at least 2 ranks: mpiexec -n 2 python ...")
        for micro_batches in args.micro_batches:
            check_micro_batches(micro_batches, args.batchsize)
    model = make_model(comm, make_stage(comm.rank, comm.size, args.channels))
    x, t = make_batch(args.batchsize)
    charts = {}
    for micro_batches in args.micro_batches:
        measure(model, x, t, micro_batches)  # the first time takes memory
        steps = [measure(model, x, t, micro_batches) for _ in range(args.steps)]
        if comm.rank == 0:
            chart = sorted(steps, key=duration)[len(steps) // 2]
            charts[micro_batches] = chart
            print(
                f"{micro_batches:2} micro-batches: {1e3 * duration(chart):5.0f} ms, "
                f"idle {idle_share(chart):3.0%}, "
                f"in theory {idle_share_in_theory(comm.size, micro_batches):3.0%}",
                flush=True,
            )
    if comm.rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "pipeline.json").write_text(json.dumps(charts))
        draw(charts, args.out / "pipeline.png")


if __name__ == "__main__":
    main()
