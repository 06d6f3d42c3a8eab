"""Make NPZ files that nobody should load: damaged, promising too much, or booby-trapped."""

from __future__ import annotations

import io
import pickle
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from chainermn.testing.traps import Trap

Members = dict[str, bytes]


def trapped_array(folder: Path) -> np.ndarray:
    return np.array(Trap(folder), object)


def members(content: bytes) -> Members:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def packed(parts: Members, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method, compresslevel=1) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return file.getvalue()


def npy(array: np.ndarray, **changes: Any) -> bytes:
    """Return an NPY file whose header may not match its contents."""
    file = io.BytesIO()
    np.lib.format.write_array(file, array)
    content = file.getvalue()
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, np.lib.format.header_data_from_array_1_0(array) | changes
    )
    return header.getvalue() + content[10 + struct.unpack_from("<H", content, 8)[0] :]


def with_trap(content: bytes, key: str, folder: Path) -> bytes:
    """Return the file with one array replaced by a trap."""
    return packed(members(content) | {f"{key}.npy": npy(trapped_array(folder))})


def with_bomb(content: bytes, key: str, megabytes: int) -> bytes:
    """Return the file with one array replaced by zeros that grow a thousandfold when unpacked."""
    parts, file = members(content), io.BytesIO()
    del parts[f"{key}.npy"]
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, part in parts.items():
            archive.writestr(name, part)
        with archive.open(f"{key}.npy", "w") as bomb:
            header = {"descr": "|u1", "fortran_order": False, "shape": (megabytes * 2**20,)}
            np.lib.format.write_array_header_1_0(bomb, header)
            for _ in range(megabytes):
                bomb.write(bytes(2**20))
    return file.getvalue()


# ---- kinds of mutants: each takes a random generator, a file and the folder of a trap ----


def truncated(draw: random.Random, content: bytes, _: Path) -> bytes:
    return content[: draw.randrange(len(content))]


def with_flipped_bits(draw: random.Random, content: bytes, _: Path) -> bytes:
    changed = bytearray(content)
    for _bit in range(draw.choice([1, 1, 1, 2, 8])):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def with_flipped_bits_in_lists(draw: random.Random, content: bytes, _: Path) -> bytes:
    """Flip bits in the ZIP file's central directory, which no checksum covers."""
    changed, start = bytearray(content), content.index(b"PK\1\2")
    for _bit in range(draw.choice([1, 1, 1, 2, 8])):
        changed[draw.randrange(start, len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def with_noise(draw: random.Random, content: bytes, _: Path) -> bytes:
    start, length = draw.randrange(len(content)), draw.randrange(1, 200)
    return content[:start] + draw.randbytes(length) + content[start + length :]


def with_bytes_moved(draw: random.Random, content: bytes, _: Path) -> bytes:
    start, length = draw.randrange(len(content)), draw.randrange(1, 500)
    rest = content[:start] + content[start + length :]
    place = draw.randrange(len(rest))
    return rest[:place] + content[start : start + length] + rest[place:]


def with_inflated_sizes(draw: random.Random, content: bytes, _: Path) -> bytes:
    changed = bytearray(content)
    places = [i for i in range(len(content)) if content.startswith(b"PK\1\2", i)]
    size = draw.choice([2**32 - 1, 2**32 - 2, 2**31, draw.randrange(2**32), 0])
    # The packed size, the unpacked size (the likeliest) and the member's offset.
    field = draw.choice([20, 24, 24, 24, 42])
    struct.pack_into("<I", changed, draw.choice(places) + field, size)
    return bytes(changed)


def promising_ten_terabytes(draw: random.Random, content: bytes, _: Path) -> bytes:
    parts = members(content)
    name = draw.choice(list(parts))
    array = np.zeros(draw.choice([0, 1, 5]), draw.choice("fdbU"))
    n = 10**13 // max(array.itemsize, 1)
    shape = draw.choice([(n,), (n // 1000, 1000), (0, n), (n, 0), (n, -1), (2**63,), (10**30,)])
    descr = draw.choice([array.dtype.str, "|S0", "<U10000000", f"({2**30},)<f8"])
    return packed(parts | {name: npy(array, shape=shape, descr=descr)})


def with_members_swapped(draw: random.Random, content: bytes, _: Path) -> bytes:
    parts = members(content)
    one, other = draw.sample(list(parts), 2)
    return packed(parts | {one: parts[other], other: parts[one]})


def without_a_member(draw: random.Random, content: bytes, _: Path) -> bytes:
    parts = members(content)
    del parts[draw.choice(list(parts))]
    return packed(parts)


def with_another_array(draw: random.Random, content: bytes, _: Path) -> bytes:
    parts = members(content)
    arrays: list[Any] = [1, -1.5, "text", b"x", True, None, 2**70, float("nan"), "[]", "{}", []]
    arrays += [np.zeros((3, 3)), np.arange(7), np.array([None, 1, "x"], object), np.zeros((0, 9))]
    name = draw.choice(list(parts))
    return packed(parts | {name: npy(np.asanyarray(draw.choice(arrays)))})


def with_another_header(draw: random.Random, content: bytes, _: Path) -> bytes:
    parts = members(content)
    name = draw.choice(list(parts))
    return packed(parts | {name: _flip(draw, parts[name], 0, 128)})


def with_another_pickle(draw: random.Random, content: bytes, _: Path) -> bytes:
    parts = members(content)
    name = draw.choice(list(parts))
    values = [None, 1, 2**70, 1.5, "x", b"x", np.float32(2), np.int64(3), True]
    array = np.array(draw.choices(values, k=draw.randrange(1, 6)), object)
    plain = npy(array)
    start = plain.index(b"\x80\x04")
    pickled = pickle.dumps(array, draw.choice([2, 3, 4, 5]))
    return packed(parts | {name: _flip(draw, plain[:start] + pickled, start, None)})


def booby_trapped(draw: random.Random, content: bytes, trap: Path) -> bytes:
    parts = members(content)
    array: Any = draw.choice(
        [
            trapped_array(trap),
            np.array([None, Trap(trap)], object),
            np.array([[Trap(trap)], 1], object),
        ]
    )
    plain = npy(array)
    start = plain.index(b"\x80\x04")
    pickled = pickle.dumps(draw.choice([array, array, Trap(trap)]), draw.choice([0, 2, 4]))
    if draw.random() < 0.3:
        pickled = _flip(draw, pickled, 0, None)
    return packed(parts | {draw.choice(list(parts)): plain[:start] + pickled})


def a_pickle(draw: random.Random, _: bytes, trap: Path) -> bytes:
    return pickle.dumps(Trap(trap), draw.randrange(6))


Mutation = Callable[[random.Random, bytes, Path], bytes]
#: A file damaged in these ways fails to load, or yields exactly what was saved.
ACCIDENTS: list[Mutation] = [
    truncated,
    with_flipped_bits,
    with_flipped_bits_in_lists,
    with_noise,
    with_bytes_moved,
    with_inflated_sizes,
]
MUTATIONS: list[Mutation] = [
    *ACCIDENTS,
    promising_ten_terabytes,
    with_members_swapped,
    without_a_member,
    with_another_array,
    with_another_header,
    with_another_pickle,
    booby_trapped,
    a_pickle,
]


def _flip(draw: random.Random, content: bytes, start: int, end: int | None) -> bytes:
    changed = bytearray(content)
    end = min(len(changed), end or len(changed))
    for _bit in range(draw.choice([1, 1, 2, 4])):
        changed[draw.randrange(start, end)] ^= 1 << draw.randrange(8)
    return bytes(changed)
