"""PyTorch: DistributedDataParallel over gloo or NCCL, with the same networks."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from benchmarks.functions import CASES, Case
from benchmarks.networks import CHANNELS, CLASSES, INPUT_SHAPES, MLP_UNITS, POOLED
from benchmarks.ranks.orders import Orders, Step, rank_and_size

# Sizes in DistributedDataParallel. A small first bucket lets the exchange start early.
FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20


def run(orders: Orders) -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    rank, size = rank_and_size()
    address = f"tcp://{os.environ['BENCHMARK_ROOT']}:29517"
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    distributed.init_process_group(backend, init_method=address, rank=rank, world_size=size)
    # CuPy does not use TF32 either.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    orders.obey(lambda what, **options: PREPARE[what](**options))


def exchange(network: str, on_gpu: bool = False) -> Step:
    """Return the all-reduces of the buckets of DDP, without the copies into them."""
    device = device_of(on_gpu)
    buckets, filled, limit = [], 0, FIRST_BUCKET
    for parameter in reversed(list(MAKERS[network]().parameters())):
        filled += parameter.numel()
        if 4 * filled >= limit:
            buckets.append(torch.full((filled,), 1e-4, device=device))
            filled, limit = 0, BUCKET
    buckets += [torch.full((filled,), 1e-4, device=device)] if filled else []

    def step() -> None:
        works = [distributed.all_reduce(bucket, async_op=True) for bucket in buckets]
        for bucket, work in zip(buckets, works, strict=True):
            work.wait()
            bucket /= distributed.get_world_size()

    return until_done(step, on_gpu)


def iteration(
    network: str,
    batchsize: int,
    alone: bool = False,
    on_gpu: bool = False,
    hook: str = "",
    mixed: bool = False,
    channels_last: bool = False,
) -> Step:
    """Return a whole iteration, with DDP and perhaps a hook, or without an exchange."""
    device = device_of(on_gpu)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model = MAKERS[network]().to(device, memory_format=layout)
    if not alone:
        # With several buckets on gloo, the order of the hook's all-reduces differs between ranks.
        bucket = {"bucket_cap_mb": 1000} if hook == "power_sgd" else {}
        model = nn.parallel.DistributedDataParallel(model, **bucket)
    if hook == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "power_sgd":
        # This hook can compress from iteration 2 on.
        state = powerSGD_hook.PowerSGDState(None, 4, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    scaler = torch.amp.GradScaler(device.type, enabled=mixed)
    x = torch.randn(batchsize, *INPUT_SHAPES[network], device=device)
    x = x.to(memory_format=layout)
    t = torch.randint(0, 10, (batchsize,), device=device)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.float16, enabled=mixed):
            loss = nn.functional.cross_entropy(model(x), t)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return until_done(step, on_gpu)


def function(name: str, backward: bool) -> Step:
    """Return the computation of one function, or of its gradients."""
    case = CASES[name]
    compute = compute_of(case)
    xs = [torch.randn(shape, requires_grad=True) for shape in case.shapes]
    xs[0].requires_grad_(not case.is_first)
    y = compute(xs)
    gy = torch.randn(y.shape)

    def gradients() -> None:
        for x in xs:
            x.grad = None
        y.backward(gy, retain_graph=True)

    def forward() -> None:
        compute(xs)

    return gradients if backward else forward


def compute_of(case: Case) -> Callable[[list[torch.Tensor]], torch.Tensor]:
    """Return the function of a case, as Chainer has it."""
    f, options = nn.functional, case.options
    window = {"kernel_size": options.get("ksize"), "stride": options.get("stride")}
    moves = {"stride": options.get("stride", 1), "padding": options.get("pad", 0)}
    made: dict[str, Callable[[list[torch.Tensor]], torch.Tensor]] = {
        "convolution": lambda xs: f.conv2d(*xs, **moves),
        "deconvolution": lambda xs: f.conv_transpose2d(*xs, **moves),
        "linear": lambda xs: f.linear(*xs),
        "batch normalization": lambda xs: f.batch_norm(
            xs[0], None, None, xs[1], xs[2], training=True
        ),
        "relu": lambda xs: f.relu(xs[0]),
        "leaky relu": lambda xs: f.leaky_relu(xs[0], options["slope"]),
        "max pooling": lambda xs: f.max_pool2d(xs[0], **window),
        "average pooling": lambda xs: f.avg_pool2d(xs[0], **window),
        "local response normalization": lambda xs: f.local_response_norm(
            xs[0], 5, options["alpha"], 0.75, 2.0
        ),
        "dropout": lambda xs: f.dropout(xs[0]),
        "add": lambda xs: xs[0] + xs[1],
        "concat": lambda xs: torch.cat(xs, 1),
        "sigmoid": lambda xs: torch.sigmoid(xs[0]),
    }
    return made[case.kind]


def device_of(on_gpu: bool) -> torch.device:
    """Return the CPU, or the GPU of this rank."""
    if not on_gpu:
        return torch.device("cpu")
    device = torch.device("cuda", rank_and_size()[0] % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def until_done(step: Callable[[], None], on_gpu: bool) -> Callable[[], None]:
    """Return a step that waits for the GPU, if there is one."""
    if not on_gpu:
        return step

    def synchronized() -> None:
        step()
        torch.cuda.synchronize()

    return synchronized


def mlp() -> nn.Module:
    units = itertools.pairwise(MLP_UNITS)
    first, *others = (nn.Linear(n_in, n_out) for n_in, n_out in units)
    layers = [layer for linear in others for layer in (nn.ReLU(), linear)]
    return nn.Sequential(first, *layers)


def conv() -> nn.Module:
    layers: list[Any] = []
    for index, (n_in, n_out) in enumerate(itertools.pairwise(CHANNELS)):
        layers += [nn.Conv2d(n_in, n_out, 3, padding=1), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if index in POOLED else []
    features = CHANNELS[-1] * 4
    head = (nn.Linear(features, features), nn.ReLU(), nn.Linear(features, CLASSES))
    return nn.Sequential(*layers, nn.Flatten(), *head)


class Bottleneck(nn.Module):
    def __init__(self, n_in: int, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *normalized(n_in, inner, 1, stride),
            nn.ReLU(),
            *normalized(inner, inner, 3),
            nn.ReLU(),
            *normalized(inner, outer, 1),
        )
        same = n_in == outer
        self.shortcut = nn.Sequential(*() if same else normalized(n_in, outer, 1, stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(self.body(x) + self.shortcut(x))


def normalized(n_in: int, n_out: int, ksize: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    convolution = nn.Conv2d(n_in, n_out, ksize, stride, ksize // 2, bias=False)
    return convolution, nn.BatchNorm2d(n_out)


def resnet50() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3), nn.BatchNorm2d(64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, ceil_mode=True))
    channels = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            inner = 64 << stage
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(Bottleneck(channels, inner, 4 * inner, stride))
            channels = 4 * inner
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


MAKERS = {"mlp": mlp, "conv": conv, "resnet50": resnet50}
PREPARE: dict[str, Callable[..., Step]] = {
    "exchange": exchange,
    "function": function,
    "iteration": iteration,
}
