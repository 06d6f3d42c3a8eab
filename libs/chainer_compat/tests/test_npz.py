"""NPZ files are read as far as they are what they claim to be, and run nothing."""

import contextlib
import io
import os
import pickle
import struct
import warnings
import zipfile
import zlib
from pathlib import Path

import chainer
import numpy as np
import pytest
from chainer.serializers import NpzDeserializer, load_npz, save_npz
from chainer.training import extensions

from chainer_compat import pickles
from chainer_compat.npz import DamagedFileError, ShapeError, UnsafeFileError, open_npz

TRUST = "CHAINER_COMPAT_TRUST_FILES"


class Trap:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


class Keeps:
    """An object that loads the array ``x`` from a file."""

    def __init__(self, x=None):
        self.x = x

    def serialize(self, serializer):
        self.x = serializer("x", self.x)


def npy(array, content=None, **changes):
    """Return the content of an NPY file, optionally with another header or other data."""
    file = io.BytesIO()
    header = np.lib.format.header_data_from_array_1_0(array)
    np.lib.format.write_array_header_1_0(file, header | changes)
    return file.getvalue() + (array.tobytes() if content is None else content)


def npz(path, method=zipfile.ZIP_DEFLATED, **members):
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return path


def object_array(content, shape=(), **changes):
    return npy(np.zeros(shape, object), content, **changes)


# ---- what can run ----


@pytest.fixture
def marker(tmp_path):
    yield tmp_path / "trapped"
    assert not (tmp_path / "trapped").exists()


def reduce_of(function, *arguments):
    """Return the pickle of an array that calls a function when unpickled."""

    class Calls:
        def __reduce__(self):
            return function, arguments

    return pickle.dumps(np.array(Calls(), object))


TRAPS = {
    "an object": lambda trap: pickle.dumps(np.array(trap, object)),
    "one of many": lambda trap: pickle.dumps(np.array([None, 1, "x", trap], object)),
    "of protocol 2": lambda trap: pickle.dumps(np.array(trap, object), protocol=2),
    "of protocol 0": lambda trap: pickle.dumps(np.array(trap, object), protocol=0),
    "no array": pickle.dumps,
    "in a list": lambda trap: pickle.dumps(np.array([[trap], None], object)),
    "in a dict": lambda trap: pickle.dumps(np.array({1: trap}, object)),
    "in an array": lambda trap: pickle.dumps(np.array([np.array(trap, object), None], object)),
    "after the array": lambda trap: (
        pickle.dumps(np.array(None))[:-1] + b"0" + pickle.dumps(trap)[2:]
    ),
    "as the shape": lambda trap: reduce_of(np.ndarray, trap),
    "as a dtype": lambda trap: reduce_of(np.dtype, trap),
    "as a state": lambda trap: reduce_of(Keeps, trap),
}


def from_path(path, target):
    load_npz(path, target)


def from_file(path, target):
    with open(path, "rb") as file:
        load_npz(file, target)


def from_memory(path, target):
    load_npz(io.BytesIO(path.read_bytes()), target)


def opened_by_numpy(path, target):
    with np.load(path, allow_pickle=True) as file:
        NpzDeserializer(file).load(target)


@pytest.mark.parametrize("load", [from_path, from_file, from_memory, opened_by_numpy])
def test_a_pickle_of_anything_else_is_refused(load, marker, tmp_path):
    path = npz(tmp_path / "model.npz", x=object_array(pickle.dumps(np.array(Trap(marker)))))
    name = "the file" if load is from_memory else str(path)
    with pytest.raises(UnsafeFileError) as caught:
        load(path, Keeps())
    assert str(caught.value) == (
        f"'x' in {name} is a pickle of more than None, numbers and strings: it has a call of "
        "posix.mkdir. Loading it could run any program. If you trust whoever made the file, "
        "CHAINER_COMPAT_TRUST_FILES=1 reads it"
    )


@pytest.mark.parametrize("kind", TRAPS)
def test_no_pickle_runs(kind, marker, tmp_path):
    content = TRAPS[kind](Trap(marker))
    path = npz(tmp_path / "model.npz", x=object_array(content))
    with pytest.raises(UnsafeFileError, match=r"'x' in .* is a pickle of more than None"):
        load_npz(path, Keeps())
    # With the switch, which is meant for this, the pickle does run.
    with warnings.catch_warnings(), contextlib.suppress(Exception):
        warnings.simplefilter("ignore")
        os.environ[TRUST] = "1"
        try:
            load_npz(path, Keeps())
        finally:
            del os.environ[TRUST]
    marker.rmdir()


@pytest.mark.parametrize("protocol", range(6))
def test_a_file_that_is_a_pickle_as_a_whole(protocol, marker, tmp_path):
    path = tmp_path / "model.npz"
    path.write_bytes(pickle.dumps(Trap(marker), protocol))
    with pytest.raises(DamagedFileError) as caught:
        load_npz(path, Keeps())
    what = ", but a pickle, which can run any program" if protocol >= 2 else ""
    assert str(caught.value) == f"{path} is not an NPZ file{what}"


def test_a_snapshot_that_is_loaded_by_itself(marker, tmp_path):
    npz(tmp_path / "snapshot_iter_1", x=object_array(pickle.dumps(np.array(Trap(marker)))))
    updater = chainer.training.StandardUpdater(
        chainer.iterators.SerialIterator([1], 1), chainer.optimizers.SGD().setup(chainer.Chain())
    )
    trainer = chainer.training.Trainer(updater, (0, "iteration"), out=tmp_path)
    trainer.extend(extensions.snapshot(target=Keeps(), autoload=True))
    with pytest.raises(UnsafeFileError, match=r"'x' in .*snapshot_iter_1 is a pickle"):
        trainer.run()


def test_the_switch_unpickles_with_a_warning(monkeypatch, tmp_path):
    path = npz(tmp_path / "old.npz", x=object_array(pickle.dumps(np.array({"a": 1}, object))))
    monkeypatch.setenv(TRUST, "1")
    loaded = Keeps()
    with pytest.warns(UserWarning, match=r"'x' in .*old\.npz is a pickle .* is set$"):
        load_npz(path, loaded)
    assert loaded.x[()] == {"a": 1}


def test_the_switch_warns_of_nothing_else(monkeypatch, tmp_path):
    monkeypatch.setenv(TRUST, "1")
    save_npz(tmp_path / "model.npz", {"x": np.array(None)})
    loaded = Keeps(1)
    load_npz(tmp_path / "model.npz", loaded)
    assert loaded.x is None


# ---- what Chainer writes ----


def make_trainer(out):
    model = chainer.links.Classifier(
        chainer.Sequential(
            chainer.links.Linear(None, 3),
            chainer.links.BatchNormalization(3),
            chainer.links.Linear(3, 2),
        )
    )
    model.add_persistent("count", 3)
    model.add_persistent("nothing", None)
    optimizer = chainer.optimizers.Adam().setup(model)
    optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(1))
    data = chainer.datasets.TupleDataset(
        np.arange(12, dtype=np.float32).reshape(6, 2), np.arange(6, dtype=np.int32) % 2
    )
    updater = chainer.training.StandardUpdater(
        chainer.iterators.SerialIterator(data, 2), optimizer
    )
    trainer = chainer.training.Trainer(updater, (2, "epoch"), out=out)
    again = chainer.iterators.SerialIterator(data, 2, repeat=False, shuffle=False)
    trainer.extend(extensions.Evaluator(again, model))
    trainer.extend(extensions.LogReport(trigger=(2, "iteration")))
    trainer.extend(extensions.PrintReport(["epoch", "main/loss"], out=io.StringIO()))
    trainer.extend(extensions.ExponentialShift("alpha", 0.9), trigger=(1, "epoch"))
    measured = "validation/main/loss", "validation/main/accuracy"
    trainer.extend(extensions.LinearShift("eps", (1e-8, 1e-7), (1, 3)))
    trainer.extend(extensions.MicroAverage(*measured, "average"))
    trainer.extend(extensions.ParameterStatistics(model.predictor[0]))
    best = chainer.training.triggers.MinValueTrigger("validation/main/loss")
    trainer.extend(extensions.snapshot_object(model, "best"), name="best", trigger=best)
    seldom = chainer.training.triggers.MaxValueTrigger("validation/main/loss", (9, "epoch"))
    trainer.extend(lambda _: None, name="seldom", trigger=seldom)
    schedule = chainer.training.triggers.ManualScheduleTrigger([1], "epoch")
    trainer.extend(lambda _: None, name="scheduled", trigger=schedule)
    trainer.extend(lambda _: None, name="once", trigger=chainer.training.triggers.OnceTrigger())
    trainer.extend(lambda _: None, name="timed", trigger=chainer.training.triggers.TimeTrigger(9))
    trainer.extend(extensions.snapshot(filename="snapshot"), trigger=(1, "epoch"))
    return trainer


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for key, array in expected.items():
        assert found[key].dtype == array.dtype, key
        np.testing.assert_array_equal(found[key], array, key)


@pytest.mark.parametrize("compression", [True, False])
def test_a_trainer_with_all_kinds_of_extensions(compression, tmp_path, monkeypatch):
    # Otherwise, a trainer can be saved only after it has begun to run.
    monkeypatch.setattr(chainer.training.Trainer, "elapsed_time", 1.5)
    first = make_trainer(tmp_path)
    first.run()
    save_npz(tmp_path / "snapshot", first, compression)
    with np.load(tmp_path / "snapshot", allow_pickle=True) as file:
        expected = dict(file)
    assert sum(array.dtype == object for array in expected.values()) >= 2
    with open_npz(tmp_path / "snapshot") as arrays:
        assert_same(dict(arrays), expected)
    second = make_trainer(tmp_path)
    load_npz(tmp_path / "snapshot", second)
    assert second.updater.iteration == 6
    again = chainer.serializers.npz.serialize(second)
    text = [key for key in again if isinstance(again[key], str)]
    assert {key: again.pop(key) for key in text} == {key: str(expected.pop(key)) for key in text}
    assert_same({key: np.asarray(value) for key, value in again.items()}, expected)


def test_links_that_do_not_know_their_input_yet(tmp_path):
    saved = chainer.Sequential(chainer.links.Linear(None, 3), chainer.links.Linear(3, 2))
    save_npz(tmp_path / "model.npz", saved)
    loaded = chainer.Sequential(chainer.links.Linear(None, 3), chainer.links.Linear(3, 2))
    load_npz(tmp_path / "model.npz", loaded)
    assert loaded[0].W.array is None
    np.testing.assert_array_equal(loaded[1].W.array, saved[1].W.array)
    saved(np.zeros((1, 5), np.float32))
    save_npz(tmp_path / "model.npz", saved)
    load_npz(tmp_path / "model.npz", loaded)
    np.testing.assert_array_equal(loaded[0].W.array, saved[0].W.array)


PLAIN = [
    np.array(None),
    np.array([None, 1, -(2**80), 2.5, 1j, "grüße", b"\0\xff", True], object),
    np.array([[None, np.float32(1.5)], [np.int64(-3), np.str_("abc")]], object),
    np.array([np.bool_(True), np.complex64(1j), np.float64("nan")], object),
    np.zeros((0, 3), object),
    np.asfortranarray(np.array([[1, None, "3"], [4, 5, None]], object)),
    np.array([None] * 3000 + ["x"] * 3000, object),
]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("array", PLAIN, ids=range(len(PLAIN)))
def test_plain_values(array, protocol):
    found = pickles.array(pickles.read(pickle.dumps(array, protocol)))
    assert (found.shape, found.dtype) == (array.shape, object)
    for one, other in zip(found.flat, array.flat, strict=True):
        assert type(one) is type(other)
        assert repr(one) == repr(other)


FILES = Path(__file__).parent / "files"


@pytest.mark.parametrize("path", sorted(FILES.glob("*.npz")), ids=lambda path: path.stem)
def test_files_that_older_releases_have_written(path):
    with np.load(path, allow_pickle=True) as file:
        expected = dict(file)
    with open_npz(path) as arrays:
        assert_same(dict(arrays), expected)
    assert any(array.dtype == object for array in expected.values())


@pytest.mark.parametrize("path", sorted(FILES.glob("*_python*.npz")), ids=lambda path: path.stem)
def test_models_that_older_releases_have_written(path):
    class Network(chainer.Chain):
        def __init__(self):
            super().__init__()
            with self.init_scope():
                self.l1 = chainer.links.Linear(None, 3)
                self.bn = chainer.links.BatchNormalization(3)
                self.l2 = chainer.links.Linear(3, 2)
            self.add_persistent("nothing", 3)

    model = chainer.links.Classifier(Network())
    load_npz(path, model)
    assert model.predictor.nothing is None
    assert model.predictor.l1.W.array is None
    np.testing.assert_allclose(
        model.predictor.l2.W.array[0], [1.0184761, 0.23103087, 0.5650746], 1e-6
    )


# None and [None, 'x', 1L, float64(0.5)], as written by NumPy 1.16 under Python 2.
START_PYTHON_2 = (
    b"\x80\x02cnumpy.core.multiarray\n_reconstruct\nq\x01cnumpy\nndarray\nq\x02K\x00\x85U\x01b\x87"
    b"Rq\x03(K\x01%scnumpy\ndtype\nq\x04U\x02O8K\x00K\x01\x87Rq\x05(K\x03U\x01|NNNJ\xff\xff\xff"
    b"\xffJ\xff\xff\xff\xffK?tb\x89]q\x06"
)
NONE_OF_PYTHON_2 = START_PYTHON_2 % b")" + b"Natb."
MANY_OF_PYTHON_2 = (
    START_PYTHON_2 % b"K\x04\x85q\x07" + b"(NU\x01xq\x08\x8a\x01\x01cnumpy.core.multiarray\nscalar"
    b"\nq\x09h\x04U\x02f8K\x00K\x01\x87Rq\x0a(K\x03U\x01<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00"
    b"tbU\x08\x00\x00\x00\x00\x00\x00\xe0?\x86Rq\x0betb."
)


def test_files_of_python_2(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy 2 has renamed what these import
        assert pickle.loads(NONE_OF_PYTHON_2)[()] is None
        assert pickle.loads(MANY_OF_PYTHON_2, encoding="latin-1").tolist() == [None, "x", 1, 0.5]
    assert pickles.array(pickles.read(NONE_OF_PYTHON_2)).tolist() is None
    assert pickles.array(pickles.read(MANY_OF_PYTHON_2)).tolist() == [None, "x", 1, 0.5]
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (2L, 1L), }\n"
    array = b"\x93NUMPY\x01\0" + struct.pack("<H", len(header)) + header
    array += np.float32([3, 4]).tobytes()
    path = npz(tmp_path / "old.npz", x=array, nothing=object_array(NONE_OF_PYTHON_2))
    with open_npz(path) as arrays, pytest.warns(UserWarning, match="created on Python 2"):
        assert arrays["x"].tolist() == [[3], [4]]
        assert arrays["nothing"][()] is None


@pytest.mark.parametrize(
    "array",
    [
        np.float16([[1, 2, 3], [4, 5, 6]]),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(6).astype(">u2"),
        np.array(True),
        np.array("grüße"),
        np.array(["a", "bc"]),
        np.array([b"a", b"bc"]),
        np.array("2020-01-01", "M8[D]"),
        np.array([(1, 2.5)], [("a", "i4"), ("b", "f8")]),
        np.array([(1, 2.5)], [("ä", "i4"), ("b", "f8")]),
        np.zeros((0, 3), np.float32),
        np.array(1j),
        np.arange(2**19),  # read in several chunks
    ],
    ids=lambda array: f"{array.dtype.str}{array.shape}",
)
def test_arrays_are_those_that_numpy_reads(array, tmp_path):
    np.savez_compressed(tmp_path / "x.npz", x=array)
    with np.load(tmp_path / "x.npz") as file, open_npz(tmp_path / "x.npz") as arrays:
        expected, found = file["x"], arrays["x"]
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.flags.c_contiguous == expected.flags.c_contiguous
    assert found.tobytes() == expected.tobytes()
    assert found.flags.writeable


# ---- what cannot be right ----


def promised(path, **changes):
    """Change numbers in a ZIP file's list of members."""
    content = bytearray(path.read_bytes())
    start = content.index(b"PK\1\2")
    for place, number in changes.values():
        struct.pack_into("<I", content, start + place, number)
    path.write_bytes(content)


ARRAY = np.arange(1000, dtype=np.float32)
TEN_TB = (10**12,)


def test_a_header_that_promises_what_is_not_there(tmp_path):
    path = npz(tmp_path / "x.npz", x=npy(ARRAY, shape=TEN_TB, descr="<f8"))
    with pytest.raises(DamagedFileError) as caught:
        load_npz(path, Keeps())
    assert str(caught.value) == (
        f"'x' in {path} is damaged: an array of float64 of shape (1000000000000,) has "
        "8000000000000 bytes, but this has 4000"
    )


@pytest.mark.parametrize(
    "content, reason",
    [
        (npy(ARRAY, shape=(-1, -1000)), "its shape cannot be"),
        (npy(ARRAY, b"", shape=TEN_TB, descr="|S0"), "its shape cannot be"),
        (npy(ARRAY, b"", shape=TEN_TB, descr="|V0"), "its shape cannot be"),
        (npy(ARRAY, shape=(10**400,)), "has 4000"),
        (npy(ARRAY, descr="(1000,1000)<f8"), "has 8000000000 "),
        (npy(ARRAY, descr="Q7"), "descr is not a valid dtype descriptor"),
        (npy(ARRAY, b""), "but this has 0"),
        (npy(ARRAY, shape=(999,)), "3996 bytes, but this has 4000"),
        (b"", "EOF"),
        (b"text", "EOF"),
        (b"\x93NUMPY\x09\x00" + bytes(100), "version"),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + bytes(100), "EOF"),
        (b"\x93NUMPY\x01\x00\xff\x03" + b"(" * 0x3FF, ""),
        (object_array(b""), "exhausted"),
        (object_array(b"\x80\x04"), "exhausted"),
        (object_array(b"."), ""),
        (object_array(b"t."), ""),
        (object_array(b"h\x05."), ""),
    ],
)
def test_members_that_are_no_arrays(content, reason, tmp_path):
    path = npz(tmp_path / "x.npz", x=content)
    with pytest.raises(DamagedFileError, match=rf"^'x' in .*x\.npz is damaged: .*{reason}"):
        load_npz(path, Keeps())


LONG_TEXT = b"\x80\x04X\xff\xff\0\0" + b"x" * 0xFFFF + b"q\0"
LONG_NUMBER = b"\x8b" + struct.pack("<I", 5 * 10**5) + b"\x7f" * 5 * 10**5 + b"q\5"
MANY_LONG_BYTES = (
    START_PYTHON_2 % (b"J" + struct.pack("<i", 9**5 + 1) + b"\x85")
    + b"(c_codecs\nencode\nq\x20X\xff\xff\0\0"
    + b"x" * 0xFFFF
    + b"q\x21X\6\0\0\0latin1q\x22\x86R"
    + 9**5 * b"h\x20h\x21h\x22\x86R"
    + b"etb."
)
SHAPE = b"J" + struct.pack("<i", 5 * 10**5) + b"\x85"
LONG_LIST = (
    b"\x80\x04cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85C\1b\x87Rq\0"
    + b"(K\1"
    + SHAPE
    + b"cnumpy\ndtype\n\x8c\1O\x85R\x89]("
    + b"N" * 5 * 10**5
    + b"etq\1"
)


@pytest.mark.parametrize(
    "pickle_, what",
    [
        (b"\x80\x04" + b"]" * 2**20 + b".", "1048579 bytes"),
        (pickle.dumps(np.arange(3), 4), "an array of int64"),
        (pickle.dumps([None]), "a value of type list"),
        (pickle.dumps(None), "a value of type nonetype"),
        (b"\x80\x04(N.", ""),
        (
            pickle.dumps(np.array([None, None], object)).replace(b"K\x02\x85", b"K\x03\x85"),
            "2 values",
        ),
        (pickle.dumps(bytearray(9), 5), "a value of type bytearray"),
        (b"\x80\x05\x96" + struct.pack("<Q", 10**13) + b".", ""),
        (b"\x80\x05\x8e" + struct.pack("<Q", 10**13) + b".", ""),
        (b"\x80\x04" + b"(" * 200_000 + b"t" * 200_000 + b".", "a value of type tuple"),
        # Small, but each of many short instructions would make something large.
        (MANY_LONG_BYTES, "more than 1048576 characters"),
        (LONG_TEXT + 9**5 * b"h\0h\0\x93", "no name of at most 100 characters"),
        (LONG_LIST + 9**5 * b"h\0h\1b" + b".", "too many values"),
        (
            LONG_LIST[:-2]
            .replace(SHAPE, b"(" + LONG_NUMBER + 8**5 * b"h\5" + b"t")
            .replace(b"N" * 5 * 10**5, b"N")
            + b"b.",
            "1 values in",
        ),
    ],
    ids=[*map(str, range(14))],
)
def test_pickles_that_are_no_arrays_of_plain_values(pickle_, what, tmp_path):
    path = npz(tmp_path / "x.npz", x=object_array(pickle_))
    with pytest.raises(OSError, match=rf"'x' in .*x\.npz is .*{what}"):
        load_npz(path, Keeps())


def test_a_list_that_promises_more_than_can_be_packed(tmp_path):
    path = npz(tmp_path / "x.npz", x=npy(ARRAY))
    promised(path, size=(24, 2**32 - 2))
    with pytest.raises(
        DamagedFileError, match="'x' claims to have 4294967294 bytes, but has at most"
    ):
        load_npz(path, Keeps())


def test_folders_among_the_members(tmp_path):
    path = npz(tmp_path / "x.npz", x=npy(ARRAY))
    with zipfile.ZipFile(path, "a") as archive:
        archive.mkdir("part")
    with open_npz(path) as arrays:
        arrays.verify()
        assert list(arrays) == ["x"]


def test_members_that_overlap(tmp_path):
    path = npz(tmp_path / "x.npz", zipfile.ZIP_STORED, x=npy(ARRAY), y=npy(ARRAY))
    content = path.read_bytes()
    promised(path, packed=(20, len(content)), size=(24, len(content)))
    with pytest.raises(DamagedFileError, match="overlap"):
        load_npz(path, Keeps())


def test_two_members_of_one_name(tmp_path):
    path = npz(tmp_path / "x.npz", x=npy(ARRAY))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("x", npy(-ARRAY))
    with pytest.raises(DamagedFileError, match=r"x\.npz is damaged: 'x' occurs twice"):
        load_npz(path, Keeps())


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_compressions(method, tmp_path):
    path = npz(tmp_path / "x.npz", method, x=npy(ARRAY))
    with pytest.raises(DamagedFileError, match="compressed in a way that NumPy never uses"):
        load_npz(path, Keeps())


def test_an_encrypted_member(tmp_path):
    path = npz(tmp_path / "x.npz", x=npy(ARRAY))
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\1\2") + 8] |= 1
    path.write_bytes(content)
    with pytest.raises(DamagedFileError, match=r"'x' in .* is damaged: .*password"):
        load_npz(path, Keeps())


def test_a_bit_that_has_flipped(tmp_path):
    path = npz(tmp_path / "x.npz", zipfile.ZIP_STORED, x=npy(ARRAY))
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedFileError, match=r"'x' in .* is damaged: Bad CRC-32"):
        load_npz(path, Keeps())
    with open_npz(path) as arrays, pytest.raises(DamagedFileError, match="Bad CRC-32"):
        arrays.verify()


def test_errors_of_the_system_stay_what_they_are(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_npz(tmp_path / "absent.npz", Keeps())
    with pytest.raises(IsADirectoryError):
        load_npz(tmp_path, Keeps())


def test_damaged_files_raise_what_they_have_raised(tmp_path):
    path = npz(tmp_path / "x.npz", x=npy(ARRAY))
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(zipfile.BadZipFile, match=r"x\.npz is damaged: File is not a zip file"):
        load_npz(path, Keeps())


# ---- what does not fit ----


def damaged_behind_its_header(path, array):
    """Write an array whose data cannot be read without an error."""
    content = npy(array)
    npz(path, zipfile.ZIP_STORED, x=content)
    spoilt = content[:-1] + bytes([content[-1] ^ 1])
    path.write_bytes(path.read_bytes().replace(content, spoilt))
    assert zlib.crc32(spoilt) != zlib.crc32(content)
    return path


@pytest.mark.parametrize(
    "value, error, message",
    [
        (np.zeros(3, np.float32), ShapeError, r"could not broadcast shape \(9000,\) to \(3,\)"),
        (np.zeros(9001, np.float32), ShapeError, r"could not broadcast shape"),
        (1, TypeError, r"an array of shape \(9000,\) is not of type int"),
        (1.5, TypeError, r"an array of shape \(9000,\) is not of type float"),
    ],
)
def test_what_does_not_fit_is_not_read(value, error, message, tmp_path):
    path = damaged_behind_its_header(tmp_path / "x.npz", np.zeros(9000, np.float32))
    with pytest.raises(error, match=rf"'x' in .*x\.npz: {message}") as caught:
        load_npz(path, Keeps(value))
    if isinstance(caught.value, ShapeError):
        for found in (caught.value, pickle.loads(pickle.dumps(caught.value))):
            assert (found.file, found.key) == (str(path), "x")
            assert (found.saved, found.expected) == ((9000,), value.shape)
    with pytest.raises(DamagedFileError):
        load_npz(path, Keeps(np.zeros(9000, np.float32)))
    load_npz(path, Keeps(value), ignore_names="x")  # skips the array
    load_npz(path, Keeps(value), path="elsewhere", strict=False)


def test_long_strings_are_not_read_for_numbers(tmp_path):
    path = damaged_behind_its_header(tmp_path / "x.npz", np.array("x" * 9000))
    with pytest.raises(TypeError, match="cannot cast from <U9000 to float32"):
        load_npz(path, Keeps(np.zeros((), np.float32)))


@pytest.mark.parametrize("shape", [(), (1,), (3,), (1, 3), (1, 1, 2, 3), (2, 1)])
def test_shapes_that_numpy_copies_to_another(shape, tmp_path):
    array = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    save_npz(tmp_path / "x.npz", {"x": array})
    loaded = Keeps(np.zeros((2, 3), np.float32))
    load_npz(tmp_path / "x.npz", loaded)
    expected = np.zeros((2, 3), np.float32)
    np.copyto(expected, array)
    np.testing.assert_array_equal(loaded.x, expected)


def test_a_missing_array(tmp_path):
    save_npz(tmp_path / "x.npz", {"y": ARRAY})
    with pytest.raises(KeyError, match="x is not a file in the archive"):
        load_npz(tmp_path / "x.npz", Keeps())
