"""Events on streams, including after work on the GPU has failed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from chainermn.gradients.overlap.progress import ProgressEngine
from chainermn.transport.gpu.device import Gpu
from chainermn.transport.host.mpi import ThreadSupport

ILLEGAL_ADDRESS = 700
FAILED = (
    f"the GPU of rank 0, on {MPI.Get_processor_name()}, has failed: cudaErrorIllegalAddress: an "
    "illegal memory access .* CUDA_LAUNCH_BLOCKING=1"
)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    import stand_in_cupy

    found = stand_in_cupy.StandInCupy()
    monkeypatch.setitem(sys.modules, "cupy", found)
    return found


@pytest.mark.parametrize("kind", ["record", "timed_event"])
def test_event(cupy: Any, kind: str) -> None:
    event = getattr(Gpu(), kind)()
    assert event.Test()
    event.Wait()
    cupy.status = 600
    assert not event.Test()


def test_only_events_for_the_timeline_take_the_time(cupy: Any) -> None:
    gpu = Gpu()
    assert gpu.record().event.disable_timing
    first, second = gpu.timed_event(), gpu.timed_event()
    assert not second.event.disable_timing
    assert second.nanoseconds_since(first) == 0.25e6


def test_waiting_leaves_the_core_to_others(cupy: Any) -> None:
    assert Gpu().record().event.block
    assert Gpu().timed_event().event.block


@pytest.mark.parametrize("kind", ["record", "timed_event"])
def test_error_of_cuda_is_raised_by_each_call(cupy: Any, kind: str) -> None:
    event = getattr(Gpu(), kind)()
    cupy.status = ILLEGAL_ADDRESS
    for call in (event.Test, event.Wait, event.Test):
        with pytest.raises(RuntimeError, match=FAILED):
            call()


@pytest.mark.parametrize("support", ["multiple", "serialized", "funneled"])
def test_exchange_ends_by_an_error_of_cuda(cupy: Any, support: ThreadSupport) -> None:
    """Raise the error instead of polling forever."""
    event = Gpu().record()
    cupy.status = ILLEGAL_ADDRESS

    def exchange(stream: Any) -> Iterator[None]:
        while not event.Test():
            yield

    stream: Any = None
    engine = ProgressEngine([stream], support)
    try:
        with pytest.raises(RuntimeError, match=FAILED):
            engine.wait(engine.submit(exchange))
    finally:
        engine.end()
