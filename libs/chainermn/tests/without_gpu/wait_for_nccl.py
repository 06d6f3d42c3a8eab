"""Wait for a GPU that waits for NCCL, after an ``error`` or with a rank ``killed``."""

import os
import signal
import sys
import threading
import time
from types import SimpleNamespace

import chainer
import numpy as np
from stand_in_gpu import StandInGpu

import chainermn
from chainermn.communicators.pure_nccl_communicator import PureNcclCommunicator
from chainermn.transport.gpu import device as gpu
from chainermn.transport.gpu import nccl_watch

HURRY = 20
nccl_watch.time = SimpleNamespace(
    sleep=lambda seconds: time.sleep(seconds / HURRY), monotonic=lambda: HURRY * time.monotonic()
)


def main(how: str) -> None:
    stand_in = StandInGpu()
    gpu.use(stand_in)
    comm = PureNcclCommunicator(chainermn.create_communicator("naive").mpi_comm)
    model = chainer.Chain()
    with model.init_scope():
        model.p = chainer.Parameter(stand_in.to_gpu(np.zeros(3, "f")))
    for step in range(3):
        model.p.grad = stand_in.to_gpu(np.ones(3, "f"))
        if step == 2 and how == "killed" and comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with stand_in.on(stand_in.new_stream()):
            comm.multi_node_mean_grad(model)
            if step == 2 and how == "error":
                if comm.rank == 0:
                    stand_in.library.asynchronous_error = 6
                threading.Event().wait()
            stand_in.record().Wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
