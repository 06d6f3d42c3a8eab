"""A stand-in for an MPI that is CUDA-aware only in some calls, like Open MPI."""

from __future__ import annotations

from typing import Any, ClassVar

from mpi4py import MPI
from stand_in_gpu import GpuArray

#: The calls in which it must take GPU memory.
TAKING = {"Bcast", "Send", "Recv", "Isend"}


class CudaAwareMpi(MPI.Intracomm):
    """A communicator whose `log` tells which calls get GPU memory, and how many bytes at once.

    Only calls in `TAKING` may get any: in non-blocking collectives, Open MPI would crash.
    """

    log: ClassVar[set[tuple[str, int]]] = set()

    def Split(self, *args: Any) -> CudaAwareMpi:
        return CudaAwareMpi(super().Split(*args))


def _arrays(given: Any) -> list[GpuArray]:
    if isinstance(given, list | tuple):
        return [array for each in given for array in _arrays(each)]
    return [given] if isinstance(given, GpuArray) else []


def _guard(name: str) -> None:
    original = getattr(MPI.Intracomm, name)

    def call(self: CudaAwareMpi, *args: Any, **kwargs: Any) -> Any:
        for array in _arrays([*args, *kwargs.values()]):
            assert name in TAKING, f"a segmentation fault in MPI_{name}"
            self.log.add((name, array.nbytes))
        return original(self, *args, **kwargs)

    setattr(CudaAwareMpi, name, call)


for _name in dir(MPI.Intracomm):
    if _name[0].isupper() and _name not in vars(CudaAwareMpi):
        _guard(_name)
