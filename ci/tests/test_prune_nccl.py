"""Kernels for other GPUs become zeros in place, in a made-up library."""

from __future__ import annotations

import struct

import pytest

from ci.gpu_proof.prune_nccl import prune

_HEADER = 64  # bytes of an ELF header, of a section's entry, and of a program's header


def program(kind: int, architecture: int, code: bytes) -> bytes:
    header = struct.pack("<HHIQIII", kind, 0x101, _HEADER, len(code), 0, 0, 0)
    header += struct.pack("<I", architecture)
    return header.ljust(_HEADER, b"h") + code


def fat_binary(*programs: bytes) -> bytes:
    body = b"".join(programs)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def library(contents: dict[str, bytes]) -> bytearray:
    names = b"\0" + b"".join(name.encode() + b"\0" for name in [*contents, ".shstrtab"])
    contents = {**contents, ".shstrtab": names}
    body, table = b"", b""
    for name, content in contents.items():
        name_at = names.index(b"\0" + name.encode() + b"\0") + 1
        section = struct.pack("<IIQQQQ", name_at, 1, 0, 0, _HEADER + len(body), len(content))
        table += section.ljust(_HEADER, b"\0")
        body += content
    head = b"\x7fELF\x02".ljust(0x28, b"\0") + struct.pack("<Q", _HEADER + len(body))
    head = head.ljust(0x3A, b"\0") + struct.pack("<HHH", _HEADER, len(contents), len(contents) - 1)
    return bytearray(head.ljust(_HEADER, b"\0") + body + table)


def made(others: bytes, ptx: bytes, debug: bytes) -> bytearray:
    first = fat_binary(program(2, 90, b"ninety"), program(2, 80, others), program(1, 90, ptx))
    second = fat_binary(program(2, 120, others), program(2, 90, b"again"))
    contents = {".text": b"host code", ".nv_fatbin": first + bytes(8) + second}
    return library({**contents, ".debug_info": debug, "__nv_relfatbin": debug})


def test_only_machine_code_of_one_architecture_stays_and_nothing_moves() -> None:
    content = made(others=b"eighty", ptx=b"ptx", debug=b"symbols")
    assert prune(content, 90) == 2
    assert content == made(others=bytes(6), ptx=bytes(3), debug=bytes(7))


def test_an_architecture_that_is_not_there_is_refused() -> None:
    content = made(others=b"eighty", ptx=b"ptx", debug=b"symbols")
    with pytest.raises(ValueError, match=r"91, only for \[80, 90, 120\]"):
        prune(content, 91)


def test_what_is_no_library_is_refused() -> None:
    with pytest.raises(ValueError, match="not a 64-bit ELF file"):
        prune(bytearray(b"<html>"), 90)
