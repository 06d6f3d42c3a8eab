"""Have the real cuDNN plan for an H200 that is not there; print its answers as JSON."""

import ctypes
import json
from types import SimpleNamespace

import cudnn
import numpy as np

from chainer_fast.channels_last import layout
from chainer_fast.cudnn import fused_normalization, graphs, normalization, padding

H200 = {
    "deviceName": "NVIDIA H200",
    "deviceVer": 900,
    "driverVer": 13000,
    "cudaDeviceId": 0,
    "pciDeviceId": 0,
    "isTccDriver": 0,
    "supportCoopLaunch": 1,
    "multiProcessorCount": 132,
    "smClockRateKHz": 1980000,
    "memClockRateKHz": 3201000,
    "memoryBusWidth": 6144,
    "l2CacheSize": 62914560,
    "totalGlobalMem": 150 * 10**9,
    "warpSize": 32,
    "maxGridSize": [2147483647, 65535, 65535],
    "maxBlockSize": [1024, 1024, 64],
    "maxThreadsPerBlock": 1024,
    "maxThreadsPerSM": 2048,
    "maxCtasPerSM": 32,
    "regsPerBlock": 65536,
    "maxRegistersPerSM": 65536,
    "maxSharedMemoryPerBlock": 49152,
    "maxSharedMemoryPerBlockOptin": 232448,
    "reservedSharedMemoryPerBlock": 1024,
    "oversizedSharedMemoryPerBlock": 0,
}
GEOMETRIES = {
    # name: (x, w, stride, pad, dilate)
    "first of ResNet-50": ((32, 3, 224, 224), (64, 3, 7, 7), (2, 2), (3, 3), (1, 1)),
    "3x3 of ResNet-50": ((32, 64, 56, 56), (64, 64, 3, 3), (1, 1), (1, 1), (1, 1)),
    "1x1 of ResNet-50": ((32, 256, 56, 56), (64, 256, 1, 1), (1, 1), (0, 0), (1, 1)),
    "strided of ResNet-50": ((32, 512, 28, 28), (1024, 512, 1, 1), (2, 2), (0, 0), (1, 1)),
    "grouped": ((4, 8, 9, 8), (6, 4, 3, 3), (1, 1), (1, 1), (1, 1)),
    "depthwise": ((4, 32, 14, 14), (32, 1, 3, 3), (1, 1), (1, 1), (1, 1)),
    "dilated": ((2, 16, 20, 20), (8, 16, 3, 3), (1, 1), (2, 2), (2, 2)),
    "odd": ((3, 5, 11, 7), (7, 5, 3, 2), (2, 1), (1, 2), (1, 2)),
    "groups of four": ((8, 128, 28, 28), (128, 4, 3, 3), (1, 1), (1, 1), (1, 1)),
    "images of DCGAN": ((8, 3, 64, 64), (64, 3, 4, 4), (2, 2), (1, 1), (1, 1)),
    "one pixel": ((8, 64, 1, 1), (10, 64, 1, 1), (1, 1), (0, 0), (1, 1)),
    "one of each": ((1, 1, 1, 1), (1, 1, 1, 1), (1, 1), (0, 0), (1, 1)),
    "more padding than filter": ((1, 2, 3, 3), (2, 2, 2, 2), (3, 3), (4, 4), (1, 1)),
}
IMAGES = (2**31, 1, 1, 1)
IMPOSSIBLE = graphs.Convolution(
    computes="y",
    x=IMAGES,
    w=(1, 1, 1, 1),
    y=IMAGES,
    stride=(1, 1),
    pad=(0, 0),
    dilate=(1, 1),
    dtype="float32",
)


def main():
    device = cudnn.create_device_properties(json.dumps(H200))
    found = {
        "inferred": {name: inferred(device, *case) for name, case in GEOMETRIES.items()},
        "convolved": {name: graphs.convolved(*case) for name, case in GEOMETRIES.items()},
        "plans": {name: outcome(device, problem) for name, problem in problems()},
        "impossible": outcome(device, IMPOSSIBLE),
        "channels last": {str(p): outcome(device, p) for p in problems_of_resnet50()},
        "described": described(),
    }
    print(json.dumps(found))


def problems():
    for dtype, tensor_cores, deterministic, channels_last in (
        ("float16", True, False, False),
        ("float16", True, True, False),
        ("float16", False, True, False),
        ("float16", True, False, True),
        ("float16", True, True, True),
        ("float16", False, True, True),
        ("float32", False, False, False),
        ("float32", False, True, False),
        ("float32", True, False, False),
    ):
        demands = {
            "dtype": dtype,
            "tensor_cores": tensor_cores,
            "deterministic": deterministic,
            "channels_last": channels_last,
        }
        label = f"{dtype}{' tensor cores' * tensor_cores}{' deterministic' * deterministic}"
        label += " channels last" * channels_last
        for name, (x, w, stride, pad, dilate) in GEOMETRIES.items():
            geometry = {"stride": stride, "pad": pad, "dilate": dilate}
            shapes = {"x": x, "w": w, "y": graphs.convolved(x, w, **geometry)}
            for computes in shapes:
                yield (
                    f"{label}, {computes}, {name}",
                    graphs.Convolution(computes=computes, **shapes, **geometry, **demands),
                )


def problems_of_resnet50():
    """Yield every convolution of a training step, channels last and as wide as we make it."""
    for n in (64, 256):
        layers = [((3, 224), (64, 7), 2, 3)]
        size, n_in = 56, 64
        for n_mid, n_out, stride in ((64, 256, 1), (128, 512, 2), (256, 1024, 2), (512, 2048, 2)):
            inner = size // stride
            layers += [
                # Chainer has the stride in the first convolution of a block, PyTorch in the 3x3.
                ((n_in, size), (n_mid, 1), stride, 0),
                ((n_in, size), (n_mid, 1), 1, 0),
                ((n_mid, size), (n_mid, 3), stride, 1),
                ((n_mid, inner), (n_mid, 3), 1, 1),
                ((n_mid, inner), (n_out, 1), 1, 0),
                ((n_in, size), (n_out, 1), stride, 0),
                ((n_out, inner), (n_mid, 1), 1, 0),
            ]
            size, n_in = inner, n_out
        for (channels, size), (n_filters, k), stride, pad in dict.fromkeys(layers):
            x, w = (n, channels, size, size), (n_filters, channels, k, k)
            geometry = {"stride": (stride, stride), "pad": (pad, pad), "dilate": (1, 1)}
            y = graphs.convolved(x, w, **geometry)
            # Nobody needs the gradient with respect to the images that are trained with.
            for computes in "yw" if channels == 3 else "ywx":
                problem = graphs.Convolution(
                    computes, x, w, y, **geometry, dtype="float16", channels_last=True
                )
                yield padding.padded(problem)


def outcome(device, problem):
    """Return how cuDNN would solve a problem, or why not."""
    try:
        plan = graphs.plan(cudnn, problem, device_property=device)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    shape = getattr(problem, problem.computes)
    result = plan.tensors[problem.computes]
    last = layout.empty(np, shape, "u1").strides
    return {
        "possible": problem.is_possible,
        "workspace": plan.workspace,
        "shape": list(result.get_dim()),
        "strides": list(result.get_stride()),
        "expected": shape,
        "dense": last if problem.channels_last else graphs.dense(shape),
    }


def inferred(device, x, w, stride, pad, dilate):
    """Return the shape that cuDNN itself infers for a convolution."""
    graph = cudnn.pygraph(
        io_data_type=cudnn.data_type.FLOAT,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        device_property=device,
    )
    image, weight = (graph.tensor(dim=shape, stride=graphs.dense(shape)) for shape in (x, w))
    geometry = {"padding": list(pad), "stride": list(stride), "dilation": list(dilate)}
    y = graph.conv_fprop(image=image, weight=weight, **geometry)
    y.set_output(True)
    graph.validate()
    return list(y.get_dim())


def described():
    """Return cuDNN's descriptors of images and of statistics, as cuDNN itself reads them."""
    library = ctypes.CDLL("libcudnn.so.9")
    runner = SimpleNamespace(cudnn=cudnn, gpu=None)
    normalizer = normalization.Normalizer(runner, library)
    fused_normalization.FusedNormalizer(normalizer)  # fails if cuDNN lacks one of its functions
    found = []
    for dtype, is_last in (("float16", False), ("float32", False), ("float16", True)):
        for descriptor in normalizer.describe(
            (2, 3, 4, 5), np.dtype(dtype), channels_last=is_last
        ):
            values = [ctypes.c_int() for _ in range(9)]
            pointers = (ctypes.byref(value) for value in values)
            library.cudnnGetTensor4dDescriptor(ctypes.c_void_p(descriptor), *pointers)
            found.append([value.value for value in values])
    return found


if __name__ == "__main__":
    main()
