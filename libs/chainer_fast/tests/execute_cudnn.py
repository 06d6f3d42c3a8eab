"""Print, as JSON, what the frontend and our launches tell cuDNN to execute."""

import ctypes
import json
import sys

import cudnn
from plan_cudnn import H200, problems

from chainer_fast.cudnn import graphs

# The compiled execute_cudnn.c, which the frontend has loaded as cuDNN.
library = ctypes.CDLL(sys.argv[1])
attributes = (ctypes.c_int64 * 8 * 4).in_dll(library, "attributes")
others = [ctypes.c_int64.in_dll(library, name) for name in ("handle", "plan")]


def main():
    device = cudnn.create_device_properties(json.dumps(H200))
    handle = cudnn.Handle(4096)
    found = {}
    for name, problem in problems():
        plan = graphs.plan(cudnn, problem, device_property=device)
        launch = graphs.launcher(plan.graph, handle)
        pointers = {uid: 2**20 * uid for uid in plan.uids}
        by_frontend = executed(plan.graph.execute, pointers, 2**30, handle)
        plan.graph.execute = None
        found[name] = by_frontend, executed(launch, pointers, 2**30)
    print(json.dumps(found))


def executed(execute, *arguments):
    """Return everything that cuDNN gets, or why it gets nothing: some plans need a device."""
    ctypes.memset(attributes, 0, ctypes.sizeof(attributes))
    for value in others:
        value.value = 0
    try:
        execute(*arguments)
    except RuntimeError as error:
        return str(error)
    return [*(value for row in attributes for value in row), *(value.value for value in others)]


if __name__ == "__main__":
    main()
