"""Sum an array with NCCL three times, the last time without rank 1.

Rank 1 is ``killed`` or ``stopped``, or it ``raises``. Rank 0 waits for its GPU, like a script
that reads a loss.
"""

import os
import signal
import sys

import cupy

import chainermn
from chainermn.transport.gpu.device import the_gpu
from chainermn.transport.gpu.nccl import NcclTransport


def fail(how: str) -> None:
    if how == "raises":
        raise RuntimeError("by design")
    os.kill(os.getpid(), signal.SIGSTOP if how == "stopped" else signal.SIGKILL)


def main(how: str) -> None:
    comm = chainermn.create_communicator("pure_nccl")
    cupy.cuda.Device(comm.intra_rank % cupy.cuda.runtime.getDeviceCount()).use()
    transport = NcclTransport(comm.mpi_comm, the_gpu())
    array = cupy.ones(1000, "f")
    for step in range(3):
        if step == 2 and comm.rank == 1:
            fail(how)
        transport.allreduce(array)
        cupy.cuda.get_current_stream().synchronize()
        comm.mpi_comm.Barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
