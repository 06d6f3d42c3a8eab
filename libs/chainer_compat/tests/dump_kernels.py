"""Print, as JSON, the CUDA kernels that repairs affect, as Chainer hands them to CuPy.

Run with ``fake_cupy`` on the path.
"""

import json

from chainer.functions.loss.negative_sampling import NegativeSamplingFunctionGrad
from chainer.links.loss.hierarchical_softmax import BinaryHierarchicalSoftmaxFunction
from chainer.training.updaters import multiprocess_parallel_updater as updater


def text_of(function):
    (text,) = (c for c in function.__code__.co_consts if isinstance(c, str) and "atomicAdd(" in c)
    # These take float16 arguments, so CuPy includes the header by itself.
    return {"text": text, "preamble": "#include <cupy/float16.cuh>\n", "loop_prep": ""}


def recorded(kernel):
    return {"text": kernel.operation, "preamble": "", **kernel.options}


kernels = {
    "memcpy_gather": recorded(updater._memcpy_gather()),
    "memcpy_scatter": recorded(updater._memcpy_scatter()),
    "negative_sampling": text_of(NegativeSamplingFunctionGrad.forward_gpu),
    "hierarchical_softmax": text_of(BinaryHierarchicalSoftmaxFunction.backward_gpu),
}
print(json.dumps(kernels))
