"""Make NVIDIA's NCCL small enough to copy, by removing kernels for other kinds of GPU.

More than nine tenths of ``libnccl.so.2`` are kernels, one copy for each architecture. They are
overwritten with zeros, so no offset changes, and xz compresses zeros to almost nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

# 64-bit ELF files: where the offset and sizes of the section table are, and one of its entries.
_SECTIONS_AT, _SIZES_AT = 0x28, 0x3A
_SECTION = struct.Struct("<IIQQQQ")
_WITHOUT_CONTENT = 8

# Kernels are in fat binaries: a header, then a header and a program for each architecture.
_FAT_BINARY = struct.Struct("<IHHQ")
_MAGIC = 0xBA55ED50
_PROGRAM = struct.Struct("<HHIQ")
_ARCHITECTURE = 28  # bytes into the header of a program
_PTX, _MACHINE_CODE = 1, 2


class Section(NamedTuple):
    """Section of an ELF file."""

    name: str
    offset: int
    size: int


def prune(library: bytearray, architecture: int) -> int:
    """Overwrite kernels for all other GPUs, and debug symbols, with zeros.

    Parameters
    ----------
    library : bytearray
        Content of ``libnccl.so.2``. It is changed in place.
    architecture : int
        Compute capability of the GPU without the dot: 90 for an H100 or an H200.

    Returns
    -------
    int
        Number of programs kept.

    Raises
    ------
    ValueError
        If there is no program for this architecture.
    """
    kept, found = 0, set()
    for section in sections(library):
        if section.name == "__nv_relfatbin" or section.name.startswith(".debug"):
            # The first would serve to link kernels again, which nobody does at run time.
            clear(library, section.offset, section.size)
        elif section.name.endswith("nv_fatbin"):
            for kind, its_architecture, offset, size in programs(library, section):
                found.add(its_architecture)
                if (kind, its_architecture) == (_MACHINE_CODE, architecture):
                    kept += 1
                else:
                    clear(library, offset, size)
    if not kept:
        raise ValueError(
            f"this library has no kernels for compute capability {architecture}, "
            f"only for {sorted(found)}"
        )
    return kept


def clear(content: bytearray, offset: int, size: int) -> None:
    content[offset : offset + size] = bytes(size)


def sections(content: bytes | bytearray) -> Iterator[Section]:
    """Yield the sections of an ELF file that have content."""
    if content[:5] != b"\x7fELF\x02":
        raise ValueError("not a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", content, _SECTIONS_AT)
    size, number, of_names = struct.unpack_from("<HHH", content, _SIZES_AT)
    headers = [_SECTION.unpack_from(content, table + i * size) for i in range(number)]
    names = headers[of_names][4]
    for name_at, kind, _, _, offset, length in headers:
        begin = names + name_at
        name = content[begin : content.index(0, begin)].decode()
        if kind != _WITHOUT_CONTENT:
            yield Section(name, offset, length)


def programs(content: bytes | bytearray, section: Section) -> Iterator[tuple[int, int, int, int]]:
    """Yield kind, architecture, offset and size of each program in a section of fat binaries."""
    at, end = section.offset, section.offset + section.size
    while at + _FAT_BINARY.size <= end:
        magic, _, header, body = _FAT_BINARY.unpack_from(content, at)
        if magic != _MAGIC:
            at += 8  # padding between fat binaries
            continue
        program, at = at + header, at + header + body
        while program + _PROGRAM.size <= at:
            kind, _, header, size = _PROGRAM.unpack_from(content, program)
            if kind not in (_PTX, _MACHINE_CODE):
                break
            (architecture,) = struct.unpack_from("<I", content, program + _ARCHITECTURE)
            yield kind, architecture, program + header, size
            program += header + size
