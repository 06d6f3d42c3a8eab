#!/usr/bin/env python3
"""Write a network that train.py has trained as an ONNX file, for programs without Chainer.

The file takes red, green and blue from 0 to 255, and returns the probability of each class.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import chainer
import numpy as np

import trained
from chainermn.files import optional_path

OPSET, IR_VERSION = 11, 6  # the highest opset of onnx_chainer, and the lowest that works


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    try:
        check_installed()
        model = trained.load(args.model)
        content = export(model)
        difference = compare(model, content)
        args.out.write_bytes(content)
    except (ImportError, OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    print(f"written: {args.out.resolve()} ({len(content) / 1e6:.1f} MB)")
    print(f"ONNX Runtime computes the same as Chainer, up to {difference:.1e}")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    default = " or else ".join(map(str, trained.DEFAULTS))
    add("--model", "-m", type=optional_path, metavar="FILE", help=f"weights; default: {default}")
    add("--out", "-o", type=Path, metavar="FILE", default=Path("model.onnx"), help="output")
    return parser.parse_args(argv)


def check_installed() -> None:
    """Tell users what to install, because not everyone needs it."""
    for name in ("onnx", "onnxruntime"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ImportError(f"{error}: pip install onnx onnxruntime") from None


def export(model: trained.Trained) -> bytes:
    """Return the content of an ONNX file.

    Its input ``images``, float32 of shape (batch, 3, insize, insize), may have a batch of any
    size; its output is ``shares``. The metadata ``classes`` has the names, as JSON.
    """
    import onnx
    import onnx_chainer

    chainer.disable_experimental_feature_warning = True  # of converters from outside
    size = model.insize
    graph = onnx_chainer.export(
        model.recognizer,
        np.zeros((2, 3, size, size), np.float32),
        opset_version=OPSET,
        input_names="images",
        output_names="shares",
        external_converters={"Reshape": convert_reshape},
    )
    graph.ir_version = IR_VERSION
    make_weights_constant(graph.graph)
    for value in (*graph.graph.input, *graph.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    onnx.helper.set_model_props(graph, {"classes": json.dumps(model.classes)})
    return graph.SerializeToString()


def convert_reshape(call):
    """Convert a function that reshapes each image of a batch: 0 stands for the batch's size."""
    from onnx_chainer import onnx_helper

    shape = np.array([0, *call.func.shape[1:]], np.int64)
    name = call.context.add_const(shape, "shape")
    return (onnx_helper.make_node("Reshape", [*call.input_names, name], call.output_names),)


def make_weights_constant(graph) -> None:
    """Remove weights from the inputs, to which onnx_chainer adds them, and drop unused weights."""
    used = {name for node in graph.node for name in node.input}
    weights = [weight for weight in graph.initializer if weight.name in used]
    images = [value for value in graph.input if value.name == "images"]
    for field, kept in ((graph.initializer, weights), (graph.input, images)):
        del field[:]
        field.extend(kept)


def compare(model: trained.Trained, content: bytes) -> float:
    """Return the difference between ONNX Runtime and Chainer on images of noise.

    Raises
    ------
    ValueError
        If it is larger than rounding errors.
    """
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    random = np.random.default_rng(0)
    difference = 0.0
    for n in (1, 3):
        images = random.integers(0, 256, (n, 3, model.insize, model.insize), np.uint8)
        expected = model.shares(images)
        (found,) = session.run(["shares"], {"images": images.astype(np.float32)})
        if not np.allclose(found, expected, rtol=1e-3, atol=1e-6):
            raise ValueError(f"ONNX Runtime computes {found}, Chainer {expected}")
        difference = max(difference, float(abs(found - expected).max()))
    return difference


if __name__ == "__main__":
    main()
