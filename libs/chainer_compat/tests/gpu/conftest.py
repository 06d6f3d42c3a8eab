"""The device that the tests compute on, or why there is none."""

import chainer
import pytest
from chainer.backends import cuda


@pytest.fixture
def device():
    try:
        cuda.check_cuda_available()
        count = cuda.cupy.cuda.runtime.getDeviceCount()
    except RuntimeError as error:
        pytest.skip(" ".join(str(error).split()))
    if count == 0:
        pytest.skip("there is no CUDA device")
    return chainer.get_device("@cupy:0")
