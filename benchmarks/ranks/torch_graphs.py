"""PyTorch on one GPU: whole steps as CUDA graphs, and compiled ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from benchmarks.networks import INPUT_SHAPES
from benchmarks.ranks.orders import Orders, Step
from benchmarks.ranks.with_torch import MAKERS, device_of, until_done

# Steps before a recording: cuDNN and the loss scale settle.
_FIRST = 4


def run(orders: Orders) -> None:
    # CuPy does not use TF32 either.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    orders.obey(lambda what, **options: PREPARE[what](**options))


def graph(network: str, batchsize: int, mixed: bool = False, channels_last: bool = False) -> Step:
    """Return the launch of a recorded step."""
    step = step_of(network, batchsize, mixed, channels_last)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_FIRST):
            step()
    torch.cuda.current_stream().wait_stream(side)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        step()
    return until_done(recorded.replay, on_gpu=True)


def compiled(
    network: str, batchsize: int, mixed: bool = False, channels_last: bool = False
) -> Step:
    """Return a step whose model is compiled, and launched by graphs."""
    step = step_of(network, batchsize, mixed, channels_last, compiles=True)

    def marked() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        step()

    for _ in range(_FIRST):
        marked()
    return until_done(marked, on_gpu=True)


def step_of(
    network: str, batchsize: int, mixed: bool, channels_last: bool, compiles: bool = False
) -> Callable[[], None]:
    """Return a step without anything that the host has to wait for."""
    device = device_of(on_gpu=True)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model = MAKERS[network]().to(device, memory_format=layout)
    # The other implementations read the loss scale on the host.
    optimizer = torch.optim.SGD(model.parameters(), 1e-4, fused=True)
    scaler = torch.amp.GradScaler(device.type, enabled=mixed)
    x = torch.randn(batchsize, *INPUT_SHAPES[network], device=device).to(memory_format=layout)
    t = torch.randint(0, 10, (batchsize,), device=device)
    compute = torch.compile(model, mode="reduce-overhead") if compiles else model

    def step() -> None:
        optimizer.zero_grad()
        # A graph must cast parameters in each step.
        with torch.autocast(device.type, torch.float16, enabled=mixed, cache_enabled=compiles):
            loss = nn.functional.cross_entropy(compute(x), t)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


PREPARE: dict[str, Callable[..., Step]] = {"graph": graph, "compiled": compiled}
