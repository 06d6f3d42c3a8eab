"""From an HDF5 file, only what is in the file itself is read."""

import chainer
import numpy as np
import pytest
from chainer.serializers import HDF5Deserializer, load_hdf5, save_hdf5

from chainer_compat.npz import DamagedFileError, UnsafeFileError

h5py = pytest.importorskip("h5py")


class Keeps:
    """An object that loads the array ``part/x`` from a file."""

    def __init__(self, x=None):
        self.x = x

    def serialize(self, serializer):
        self.x = serializer["part"]("x", self.x)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "model.h5"


@pytest.fixture
def secret(tmp_path):
    """Write six bytes to somebody else's file and to an HDF5 file beside it; return the first."""
    (tmp_path / "secret").write_bytes(b"secret")
    with h5py.File(tmp_path / "secret.h5", "w") as other:
        other["part/x"] = np.frombuffer(b"secret", np.uint8)
    return tmp_path / "secret"


def external_data(file, secret):
    file.create_dataset("part/x", (6,), "u1", external=[(str(secret), 0, 6)])


def external_array(file, secret):
    file["part/x"] = h5py.ExternalLink(f"{secret}.h5", "/part/x")


def external_group(file, secret):
    file["part"] = h5py.ExternalLink(f"{secret}.h5", "/part")


def virtual_array(file, secret):
    layout = h5py.VirtualLayout((6,), "u1")
    layout[:] = h5py.VirtualSource(f"{secret}.h5", "part/x", (6,))
    file.create_virtual_dataset("part/x", layout)


def soft_link(file, secret):
    file["third"] = h5py.ExternalLink(f"{secret}.h5", "/part")
    file["part"] = h5py.SoftLink("/third")


@pytest.mark.parametrize(
    "trap, message",
    [
        (external_data, "'part/x' in {file} has its data in other files"),
        (virtual_array, "'part/x' in {file} has its data in other files"),
        (external_array, "'part/x' in {file} is a link to /part/x in {secret}.h5"),
        (external_group, "'part' in {file} is a link to /part in {secret}.h5"),
        (soft_link, "'part' in {file} is a link to /third in the same file"),
    ],
)
def test_no_other_file_is_read(trap, message, file, secret, monkeypatch):
    with h5py.File(file, "w") as written:
        trap(written, secret)
    message = message.format(file=file, secret=secret)
    for value in (None, np.zeros(6, np.uint8)):
        with pytest.raises(UnsafeFileError) as caught:
            load_hdf5(file, Keeps(value))
        assert str(caught.value) == (
            f"{message}. If you trust whoever made the file, CHAINER_COMPAT_TRUST_FILES=1 reads it"
        )
    monkeypatch.setenv("CHAINER_COMPAT_TRUST_FILES", "1")
    loaded = Keeps()
    with pytest.warns(UserWarning, match="Reading it, because CHAINER_COMPAT_TRUST_FILES is set"):
        load_hdf5(file, loaded)
    assert loaded.x.tobytes() == b"secret"


@pytest.mark.parametrize(
    "layout",
    [{"chunks": (1000,), "compression": 4}, {"chunks": (2**29,), "maxshape": (None,)}],
)
def test_no_more_is_read_than_is_there(layout, file):
    with h5py.File(file, "w") as written:
        written.create_dataset("part/x", (10**12,), "f8", **layout)
    with pytest.raises(
        DamagedFileError, match=r"'part/x' in .*\.h5 claims to have 8000000000000 bytes"
    ):
        load_hdf5(file, Keeps())


def test_chunks_larger_than_the_file(file):
    with h5py.File(file, "w") as written:
        data = written.create_dataset("part/x", (1,), "f4", chunks=(2**25,), maxshape=(None,))
        assert data.id.get_storage_size() == 0  # chunks take no space until they are written
    with pytest.raises(DamagedFileError, match="claims to have 134217728 bytes, but has 0"):
        load_hdf5(file, Keeps())


def test_arrays_of_other_things_than_numbers(file):
    with h5py.File(file, "w") as written:
        written.create_dataset("part/x", data=["a"] * 1000, dtype=h5py.string_dtype())
    with pytest.raises(DamagedFileError, match="must hold numbers or a string"):
        load_hdf5(file, Keeps())


@pytest.mark.parametrize("value", [{}, np.dtype("f4")], ids=["a group", "a type"])
def test_what_is_no_array(value, file):
    with h5py.File(file, "w") as written:
        if value:
            written["part/x"] = value
        else:
            written.create_group("part/x")
    with pytest.raises(DamagedFileError, match=r"'part/x' in .*\.h5 is not an array"):
        load_hdf5(file, Keeps())


def test_a_small_array_that_was_never_written(file):
    with h5py.File(file, "w") as written:
        written.create_dataset("part/x", (3,), "f4", fillvalue=7)
    loaded = Keeps()
    load_hdf5(file, loaded)
    assert loaded.x.tolist() == [7, 7, 7]


def test_an_array_for_a_number_is_not_read(file):
    save_hdf5(file, {"part/x": np.zeros(1000)})
    with pytest.raises(
        TypeError, match=r"'part/x' in .*: an array of shape \(1000,\) is not of type float"
    ):
        load_hdf5(file, Keeps(1.5))


@pytest.mark.parametrize("value", [np.arange(1000.0), np.float32(2), np.zeros((0, 3)), True])
def test_what_chainer_writes(value, file):
    save_hdf5(file, Keeps(value))
    loaded = Keeps()
    load_hdf5(file, loaded)
    np.testing.assert_array_equal(loaded.x, value)


def test_texts_none_and_models(file):
    with h5py.File(file, "w") as written:
        written.create_dataset("part/x", data="grüße")
    loaded = Keeps("")
    load_hdf5(file, loaded)
    assert loaded.x == "grüße"
    save_hdf5(file, Keeps(None))
    load_hdf5(file, loaded)
    assert loaded.x is None
    saved = chainer.Sequential(chainer.links.Linear(2, 3), chainer.links.BatchNormalization(3))
    save_hdf5(file, saved)
    loaded = chainer.Sequential(chainer.links.Linear(2, 3), chainer.links.BatchNormalization(3))
    load_hdf5(file, loaded)
    np.testing.assert_array_equal(loaded[0].W.array, saved[0].W.array)
    with h5py.File(file, "r") as read, pytest.raises(KeyError, match="absent"):
        HDF5Deserializer(read)["0"]("absent", None)
    with h5py.File(file, "r") as read:
        assert HDF5Deserializer(read, strict=False)["absent"]("x", 5) == 5


def test_what_is_not_on_the_disk_yet(file):
    with h5py.File(file, "w") as written:
        written.create_dataset("x", data=np.arange(9999.0), compression=4)
        np.testing.assert_array_equal(HDF5Deserializer(written)("x", None), np.arange(9999.0))
