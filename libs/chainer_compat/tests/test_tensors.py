"""Files of PyTorch: what they hold is read as it was written, or refused; nothing in them runs."""

import io
import json
import os
import pickle
import shlex
import struct
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from chainer_compat.npz import DamagedFileError, UnsafeFileError
from chainer_compat.tensors import is_tensors, open_tensors

FILES = Path(__file__).parent / "files"
WRITTEN = ["torch2.14.pth", "torch2.14_legacy.pth"]  # by PyTorch 2.14
WHOLE = (np.arange(12, dtype=np.float32) / 8).reshape(3, 4)
EXPECTED = {
    "whole": WHOLE,
    "turned": WHOLE.T,
    "part": WHOLE[1:, 2:],
    "parameter": np.array([0.1, -0.2], np.float32),
    "half": np.array([1.5, -2.25], np.float16),
    "double": np.array([1 / 3]),
    "count": np.array(2**40 + 1),
    "flags": np.array([[True], [False]]),
    "bytes": np.array([0, 255], np.uint8),
    "empty": np.zeros((0, 3), np.float32),
}


def check(path: Path, expected: dict[str, np.ndarray]) -> None:
    assert is_tensors(path)
    with open_tensors(path) as tensors:
        assert tensors.shapes == {name: array.shape for name, array in expected.items()}
        assert list(tensors) == list(expected)
        for name, array in expected.items():
            assert tensors[name].dtype == array.dtype
            np.testing.assert_array_equal(tensors[name], array)
        with pytest.raises(KeyError, match="other"):
            tensors["other"]


@pytest.mark.parametrize("name", WRITTEN)
def test_everything_that_pytorch_wrote(name):
    check(FILES / name, EXPECTED)


def test_safetensors(tmp_path):
    arrays = {name: np.ascontiguousarray(array) for name, array in sorted(EXPECTED.items())}
    save_file(arrays, tmp_path / "x", metadata={"arch": "resnet50"})
    check(tmp_path / "x", arrays)
    with open_tensors(tmp_path / "x") as tensors:
        assert tensors.metadata == {"arch": "resnet50"}


# ---- files made here ----


class Storage:
    """Stands for numbers that are not in the pickle."""

    def __init__(self, *label):
        self.label = ("storage", *label)


def pickled(what: object) -> bytes:
    """Return a pickle in which a class of this file stands for one of PyTorch's."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, found):
            return found.label if isinstance(found, Storage) else None

    file = io.BytesIO()
    Pickler(file, 2).dump(what)
    content = file.getvalue()
    for name, global_ in GLOBALS.items():
        content = content.replace(f"c{__name__}\n{name}\n".encode(), f"c{global_}\n".encode())
    return content


GLOBALS = {
    "rebuild": "torch._utils\n_rebuild_tensor_v2",
    "FloatStorage": "torch\nFloatStorage",
    "BFloat16Storage": "torch\nBFloat16Storage",
}


def rebuild():
    raise AssertionError


class FloatStorage:
    pass


class BFloat16Storage:
    pass


class Tensor:
    def __init__(self, *shape, kind=FloatStorage, key="0", n=6, offset=0, strides=None, extra=()):
        strides = strides or tuple(np.cumprod([1, *shape[:0:-1]])[::-1].tolist())
        self.arguments = (Storage(kind, key, "cpu", n, *extra), offset, shape, strides, False, {})

    def __reduce__(self):
        return rebuild, self.arguments


SIX = np.arange(6, dtype="<f4")


def archive(path: Path, what: object, **members: bytes) -> Path:
    content = {"data.pkl": pickled(what), "data/0": SIX.tobytes(), **members}
    with zipfile.ZipFile(path, "w") as file:
        for name, value in content.items():
            file.writestr(f"x/{name.replace('__', '/')}", value)
    return path


def legacy(path: Path, what: object, numbers=SIX, little=True, keys=("0",)) -> Path:
    parts = [0x1950A86A20F9469CFC6C, 1001, {"little_endian": little}, what, list(keys)]
    blocks = [struct.pack("<q", len(numbers)) + numbers.tobytes() for _ in keys]
    path.write_bytes(b"".join(map(pickled, parts)) + b"".join(blocks))
    return path


@pytest.mark.parametrize("write", [archive, legacy])
def test_files_made_here_are_like_pytorchs(write, tmp_path):
    check(
        write(tmp_path / "x", {"a": Tensor(2, 3), "b": Tensor(2, offset=4)}),
        {
            "a": SIX.reshape(2, 3),
            "b": SIX[4:],
        },
    )


def test_ordered_dictionary_of_python_2(tmp_path):
    what = Tensor(2, 3, extra=(None,))

    class OfPython2:
        def __reduce__(self):
            return OrderedDict, ([["a", what]],)

    check(legacy(tmp_path / "x", OfPython2()), {"a": SIX.reshape(2, 3)})


class Calls:
    """Runs a program where it is unpickled."""

    def __reduce__(self):
        return os.system, ("touch trapped",)


@pytest.mark.parametrize("write", [archive, legacy])
@pytest.mark.parametrize(
    "what",
    [
        Calls(),
        {"a": Tensor(2, 3), "b": Calls()},
        {Calls(): Tensor(2, 3)},
        OrderedDict(a=Tensor(2, 3, key=Calls())),
        {"a": Tensor(2, 3, kind=os.system)},
        {0: Tensor(2, 3)},
        [Tensor(2, 3)],
        None,
    ],
)
def test_nothing_else_is_read_or_run(write, what, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "x.pth", what)
    with pytest.raises((UnsafeFileError, ValueError)) as caught, open_tensors(path):
        pass
    assert "x.pth" in str(caught.value)
    assert not Path("trapped").exists()


def refusal(path: Path) -> str:
    with pytest.raises((OSError, ValueError)) as caught, open_tensors(path):
        pass
    return str(caught.value)


@pytest.mark.parametrize("write", [archive, legacy])
def test_refusals_name_the_remedy(write, tmp_path):
    path = tmp_path / "my file.pth"
    command = 'where PyTorch is installed, run python -c "import sys, torch; found = '
    command += "torch.load(sys.argv[1], map_location='cpu', weights_only=True); "
    command += 'torch.save({}, sys.argv[2])" '
    command += shlex.join([str(path), f"{tmp_path}/my file.new.pth"])
    found = refusal(write(path, {"epoch": 90, "state_dict": OrderedDict(a=Tensor(2, 3))}))
    expected = command.replace("{}", "found['state_dict']")
    assert found.endswith(f"'epoch' is a value of type int: {expected}")
    found = refusal(write(path, {"a": Tensor(2, 3, kind=BFloat16Storage)}))
    change = "{key: value.float() for key, value in found.items()}"
    assert found.endswith(f"got BFloat16 in 'a': {command.replace('{}', change)}")
    found = refusal(write(path, {"a": Tensor(2, 3), "b": Calls()}))
    assert "a call of posix.system. Loading it could run any program. If you trust" in found


def test_other_machines_and_programs(tmp_path):
    path, what = tmp_path / "x.pth", {"a": Tensor(2, 3)}
    for written in (legacy(path, what, little=False), archive(path, what, byteorder=b"big")):
        assert "big-endian machine: where PyTorch is installed, run" in refusal(written)
    assert "TorchScript" in refusal(archive(path, what, **{"constants.pkl": b""}))
    path.write_bytes(bytes(257) + b"ustar" + bytes(250))
    assert "before PyTorch 0.1.10: if you trust" in refusal(path)


@pytest.mark.parametrize("write", [archive, legacy])
@pytest.mark.parametrize(
    "tensor",
    [
        Tensor(7),  # larger than its storage
        Tensor(2, 3, offset=1),
        Tensor(2**20, 2**19, strides=(0, 0)),  # a few bytes would become many
        Tensor(3, 3, strides=(2, 1)),
        Tensor(2, 3, strides=(-3, -1), offset=5),
        Tensor(2, 3, strides=(1,)),
        Tensor(2, 3, n=2**50),
        Tensor(2, 3, n=7),
        Tensor(2, 3, n=-6),
        Tensor(2, 3, key="1"),
        Tensor(*[1] * 65),
    ],
)
def test_tensors_that_are_larger_than_their_storage(write, tensor, tmp_path):
    path = write(tmp_path / "x.pth", {"a": tensor})
    with pytest.raises(DamagedFileError, match=r"x\.pth"), open_tensors(path) as tensors:
        tensors["a"]


def read_all(path: Path) -> None:
    if is_tensors(path):
        with open_tensors(path) as tensors:
            for array in tensors.values():
                assert array.nbytes < 1000


@pytest.mark.parametrize("name", [*WRITTEN, "x.safetensors"])
@pytest.mark.parametrize("every", [61, pytest.param(1, marks=pytest.mark.nightly)])
def test_damaged_files_are_refused_or_read(name, every, tmp_path):
    path = tmp_path / "damaged"
    if name in WRITTEN:
        content = (FILES / name).read_bytes()
    else:
        save_file({"a": SIX, "b": SIX[:2]}, path)
        content = path.read_bytes()
    for i in range(0, len(content), every):
        flipped = content[:i] + bytes([content[i] ^ (1 << i % 8)]) + content[i + 1 :]
        for damaged in (content[:i], flipped):
            path.write_bytes(damaged)
            try:
                read_all(path)
            except (OSError, ValueError) as error:
                assert str(path) in str(error)


def test_wrong_checksum(tmp_path):
    path = archive(tmp_path / "x.pth", {"a": Tensor(2, 3)})
    content = path.read_bytes()
    path.write_bytes(content.replace(SIX.tobytes(), SIX[::-1].tobytes()))
    with open_tensors(path) as tensors, pytest.raises(DamagedFileError, match="CRC"):
        tensors["a"]


def test_other_files_are_not_pytorchs(tmp_path):
    others = [b"", b"PK\3\4", b"\x93NUMPY", b"\x80\x04.", json.dumps({"a": 1}).encode() * 100]
    for content in others:
        (tmp_path / "x").write_bytes(content)
        assert not is_tensors(tmp_path / "x")
        assert refusal(tmp_path / "x").endswith("neither .pth nor .safetensors")
    np.savez(tmp_path / "x.npz", a=SIX)
    assert not is_tensors(tmp_path / "x.npz")
    with pytest.raises(FileNotFoundError):
        is_tensors(tmp_path / "absent")


def test_error_without_safetensors(tmp_path, monkeypatch):
    save_file({"a": SIX}, tmp_path / "x")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match="pip install safetensors"), open_tensors(tmp_path / "x"):
        pass
