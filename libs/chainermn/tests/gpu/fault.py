"""Write to an invalid address on the last rank's GPU, then average gradients."""

import sys
import time

import chainer
import cupy
import numpy as np

import chainermn
from chainermn.transport.gpu.device import the_gpu

WRITE = 'extern "C" __global__ void write(int* address) { *address = 1; }'


def main(how: str) -> None:
    comm = chainermn.create_communicator("flat")
    cupy.cuda.Device(comm.rank % cupy.cuda.runtime.getDeviceCount()).use()
    model = chainer.Link()
    with model.init_scope():
        model.p = chainer.Parameter(cupy.zeros(1000, "f"))
    model.p.grad = cupy.ones(1000, "f")
    comm.multi_node_mean_grad(model)
    if comm.rank == comm.size - 1:
        write = cupy.RawKernel(WRITE, "write")
        write.compile()
        # Delay the fault: after it, CUDA refuses to record an event.
        cupy.cuda.get_current_stream().launch_host_func(lambda _: time.sleep(2), None)
        write((1,), (1,), (np.uint64(64),))
        if how == "test":
            event = the_gpu().record()
            while not event.Test():
                pass
        elif how == "wait":
            the_gpu().record().Wait()
    comm.multi_node_mean_grad(model)


if __name__ == "__main__":
    main(*sys.argv[1:])
