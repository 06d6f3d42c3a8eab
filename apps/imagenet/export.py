#!/usr/bin/env python3
"""Write a network that train.py has trained for programs without Chainer.

An ONNX file takes red, green and blue from 0 to 255, and returns the probability of each class.
A safetensors file has the weights under their names in torchvision.
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
from chainermn.files import atomic_write, optional_path
from data import CENTER
from models.torchvision import COUNTER, NAMES
from weights import open_weights

OPSET, IR_VERSION = 11, 6  # the highest opset of onnx_chainer, and the lowest that works


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    try:
        check_installed(args.format)
        model = trained.load(args.model)
        lines = {"onnx": write_onnx, "safetensors": write_tensors}[args.format](model, args.out)
    except (ImportError, OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    size = args.out.stat().st_size / 1e6
    print(f"written: {args.out.resolve()} ({size:.1f} MB)", *lines, sep="\n")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    default = " or else ".join(map(str, trained.DEFAULTS))
    add("--model", "-m", type=optional_path, metavar="FILE", help=f"weights; default: {default}")
    kind = "default: the ending of --out, else onnx"
    add("--format", "-f", choices=["onnx", "safetensors"], help=kind)
    add("--out", "-o", type=Path, metavar="FILE", help="output; default: model.FORMAT")
    args = parser.parse_args(argv)
    is_tensors = args.out is not None and args.out.suffix == ".safetensors"
    args.format = args.format or ("safetensors" if is_tensors else "onnx")
    args.out = args.out or Path(f"model.{args.format}")
    return args


def check_installed(kind: str) -> None:
    """Tell users what to install, because not everyone needs it."""
    packages = {"onnx": ["onnx", "onnxruntime"], "safetensors": ["safetensors"]}[kind]
    for name in packages:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ImportError(f"{error}: pip install {' '.join(packages)}") from None


def write_onnx(model: trained.Trained, path: Path) -> list[str]:
    """Write an ONNX file, unless it computes something else; return what to tell."""
    content = export(model)
    difference = compare(model, content)
    with atomic_write(path, "wb") as file:
        file.write(content)
    return [f"ONNX Runtime computes the same as Chainer, up to {difference:.1e}"]


def write_tensors(model: trained.Trained, path: Path) -> list[str]:
    """Write a safetensors file, and read it back; return what to tell."""
    content = to_tensors(model)
    with atomic_write(path, "wb") as file:
        file.write(content)
    check_tensors(model, path)
    return how_to_load(model, path)


def arrays_of(model: trained.Trained) -> dict[str, np.ndarray]:
    """Return the weights under their names in torchvision.

    Raises
    ------
    ValueError
        If torchvision has no network that computes the same.
    """
    arch = model.about["arch"]
    own = chainer.serializers.npz.serialize(model.recognizer.network)
    names = NAMES.get(arch, {})
    if names.keys() != own.keys():
        which = "Chainer's ResNet-50, which computes something else" if names else arch
        raise ValueError(
            f"expected one of torchvision's {', '.join(NAMES)}, got {which}: use --format onnx"
        )
    return {
        other: np.asarray(own[name], np.int64 if COUNTER in other else np.float32, order="C")
        for name, other in names.items()
    }


def to_tensors(model: trained.Trained) -> bytes:
    """Return the content of a safetensors file, which torchvision and --initmodel take."""
    from safetensors.numpy import save

    about = {name: json.dumps(model.about[name]) for name in ("classes", "mean", "deviation")}
    return save(arrays_of(model), {"format": "pt", "arch": model.about["arch"], **about})


def check_tensors(model: trained.Trained, path: Path) -> None:
    """Raise OSError unless a file has the weights, bit for bit."""
    own = arrays_of(model)
    with open_weights(path) as saved:
        for name, other in saved.names.items():
            if saved.read(name).tobytes() != own[other].tobytes():
                raise OSError(f"{path} has another {other} than was written: is the disk damaged?")


def how_to_load(model: trained.Trained, path: Path) -> list[str]:
    """Return the lines of Python that load a file into torchvision, and prepare images for it."""
    about = model.about
    mean, std = ([float(f"{v / 255:.7g}") for v in about[n]] for n in ("mean", "deviation"))
    size = model.insize
    scaled = f"Resize({round(size / CENTER)}), CenterCrop({size})"
    return [
        "import safetensors.torch, torchvision",
        "from torchvision.transforms import CenterCrop, Compose, Normalize, Resize, ToTensor",
        f"model = torchvision.models.{about['arch']}(num_classes={len(about['classes'])})",
        f"model.load_state_dict(safetensors.torch.load_file({str(path)!r}))",
        "model.eval()",
        f"prepare = Compose([{scaled}, ToTensor(), Normalize({mean}, {std})])",
    ]


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
