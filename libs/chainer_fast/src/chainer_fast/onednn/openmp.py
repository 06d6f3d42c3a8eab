"""Load LLVM's OpenMP, whose threads compute for oneDNN, in place of GCC's.

oneDNN's wheel needs GCC's OpenMP from the system, and slim systems lack it. LLVM's comes by pip
and has the same functions. Its threads also yield to those of NumPy's BLAS on the same cores.
"""

import ctypes
import functools
import os
import struct
import warnings
from pathlib import Path

#: Distribution that contains it.
DISTRIBUTION = "cmeel-libomp"
#: The name of GCC's OpenMP, which LLVM's has too.
FILE = "libgomp.so.1"
#: Variable with its number of threads, and the first number that counts as nonsense.
NUMBER_OF_THREADS = "OMP_NUM_THREADS"
MOST_THREADS = 1 << 15


def load(folder: Path) -> None:
    """Load it from a folder, so that libraries that are loaded later find it.

    Raises
    ------
    OSError
        If it cannot be loaded.
    """
    # Its own name is `libomp.so`. The system's loader also knows it as `libgomp.so.1` only if it
    # has searched for that, and it searches a folder only if a library says so.
    _drop_nonsense()
    memory = os.memfd_create(FILE)
    try:
        os.write(memory, _library_that_needs(FILE, folder))
        ctypes.CDLL(f"/proc/self/fd/{memory}")
    finally:
        os.close(memory)
    _start()
    os.register_at_fork(after_in_child=_start_in_child)


def max_threads() -> int:
    """Return the number of threads that compute for this thread."""
    return int(_functions().omp_get_max_threads())


def set_threads(number: int) -> None:
    """Set the number of threads that compute for this thread."""
    _functions().omp_set_num_threads(number)


def _drop_nonsense() -> None:
    """Take the variable out of the environment if it names no numbers of threads.

    LLVM's OpenMP would abort the process, or each process that is forked from it.
    """
    value = os.environ.get(NUMBER_OF_THREADS)
    numbers = (value or "").split(",")
    if value is None or all(n.strip().isdecimal() and 0 < int(n) < MOST_THREADS for n in numbers):
        return
    del os.environ[NUMBER_OF_THREADS]
    if value.strip():
        warnings.warn(f"{NUMBER_OF_THREADS}={value!r} is not a number of threads", stacklevel=2)


def _start_in_child() -> None:
    set_threads(1)  # other processes use the cores
    _start()


def _start() -> None:
    """Start OpenMP in this process, and remove the file that tells others like it.

    OpenMP aborts if it finds such a file. Processes that are killed, and all that multiprocessing
    starts, would leave theirs behind.
    """
    name = f"__KMP_REGISTERED_LIB_{os.getpid()}_{os.getuid()}"
    files = [Path(folder, name) for folder in ("/dev/shm", "/tmp")]  # noqa: S108
    for file in files:
        file.unlink(missing_ok=True)
    # An empty region that one thread executes. A forked process writes the file only then.
    _functions().GOMP_parallel_start(None, None, 1)
    _functions().GOMP_parallel_end()
    for file in files:
        file.unlink(missing_ok=True)


@functools.cache
def _functions() -> ctypes.PyDLL:
    return ctypes.PyDLL(FILE)


def _library_that_needs(name: str, folder: Path) -> bytes:
    """Return an empty shared library (ELF, x86-64) that needs another one from a folder."""
    strings = b"\0".join([b"", name.encode(), os.fsencode(folder), b""])
    strings += bytes(-len(strings) % 8)
    n_segments, n_entries = 3, 7
    symbols_at = 64 + 56 * n_segments
    strings_at = symbols_at + 24
    dynamic_at = strings_at + len(strings)
    size = dynamic_at + 16 * n_entries
    dynamic = [
        *(1, 1),  # DT_NEEDED: offset of the name in the strings
        *(29, 2 + len(name)),  # DT_RUNPATH: offset of the folder
        *(5, strings_at),  # DT_STRTAB
        *(10, len(strings)),  # DT_STRSZ
        *(6, symbols_at),  # DT_SYMTAB: only the empty symbol that comes first in each
        *(11, 24),  # DT_SYMENT
        *(0, 0),  # DT_NULL
    ]
    loaded = 1, 6, 0, 0, 0, size, size, 4096  # PT_LOAD, readable and writable
    linking = 2, 6, *[dynamic_at] * 3, *[16 * n_entries] * 2, 8  # PT_DYNAMIC
    stack = 0x6474E551, 6, 0, 0, 0, 0, 0, 16  # PT_GNU_STACK: no code on the stack
    identity = b"\x7fELF", 2, 1, 1  # 64 bits, little-endian, version 1
    header = 3, 62, 1, 0, 64, 0, 0, 64, 56, n_segments, 64, 0, 0  # ET_DYN, EM_X86_64
    return b"".join(
        [
            struct.pack("<4s3B9x2HI3QI6H", *identity, *header),
            *(struct.pack("<2I6Q", *segment) for segment in (loaded, linking, stack)),
            bytes(24),
            strings,
            struct.pack(f"<{2 * n_entries}Q", *dynamic),
        ]
    )
