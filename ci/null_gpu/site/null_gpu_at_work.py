"""The null GPU in a process: takes CUDA's place, and notes where the host waits."""

from __future__ import annotations

import atexit
import ctypes
import importlib.machinery
import json
import os
import sys
import threading
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

#: Variable with the folder of the libraries. Processes that inherit it use the null GPU.
LIBRARIES = "CHAINERMN_NULL_GPU"
#: Variable with the folder in which each process writes what it waited for.
NOTES = "CHAINERMN_NULL_GPU_NOTES"

PACKAGES = ("cupy", "cupy_backends", "cupyx")
DEPTH = 12
#: What a note counts: kernels launched, captures that succeeded, launches of graphs, and kernels
#: that these launched.
COUNTS = ("launches", "captures", "replays", "replayed")


def install() -> None:
    """Have CuPy's modules use the null GPU as soon as they are loaded."""
    loader = importlib.machinery.ExtensionFileLoader
    create, execute = loader.create_module, loader.exec_module

    def create_module(self: Any, spec: Any) -> ModuleType:
        if spec.name.split(".")[0] not in PACKAGES:
            return create(self, spec)
        gpu = _gpu()
        module = create(self, spec)
        patched = gpu.null_gpu_patch(os.fsencode(self.path))
        if patched < 0 or (patched == 0 and spec.name.endswith("api.runtime")):
            raise ImportError(f"the null GPU finds no CUDA runtime to replace in {self.path}")
        return module

    def exec_module(self: Any, module: ModuleType) -> None:
        execute(self, module)
        if module.__name__ == "cupy.cuda.memory":
            _fill_with_zeros()

    loader.create_module = create_module  # type: ignore[method-assign]
    loader.exec_module = exec_module  # type: ignore[method-assign]


def _fill_with_zeros() -> None:
    """Fill every new array of this thread with zeros, instead of what another left there."""
    from cupy.cuda.memory_hook import MemoryHook

    class Zeros(MemoryHook):
        name = "zeros of the null GPU"

        def malloc_postprocess(self, **memory: int) -> None:
            ctypes.memset(memory["mem_ptr"], 0, memory["mem_size"])

    Zeros().__enter__()


_loaded: list[Any] = []


def _gpu() -> Any:
    if not _loaded:
        folder = Path(os.environ[LIBRARIES])
        # From now on, whoever loads CUDA's libraries by name gets these.
        libraries = [ctypes.CDLL(str(path)) for path in sorted(folder.glob("*.so.*[0-9]"))]
        (gpu,) = (each for each in libraries if each._name.endswith("libcuda.so.1"))
        for name in COUNTS:
            getattr(gpu, f"null_gpu_{name}").restype = ctypes.c_ulong
        gpu.null_gpu_is_capturing.restype = ctypes.c_bool
        _loaded.extend([gpu, *libraries])
        if NOTES in os.environ:
            _loaded.append(_listen(gpu))
    return _loaded[0]


def _listen(gpu: Any) -> Any:
    notes = _Notes(gpu)
    listener = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_size_t)(notes.take)
    gpu.null_gpu_listen(listener)
    atexit.register(notes.end)
    return listener


class _Notes:
    def __init__(self, gpu: Any) -> None:
        self._gpu = gpu
        rank = os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
        self._rank = int(rank)
        self._path = Path(os.environ[NOTES], f"{self._rank}-{os.getpid()}.jsonl")
        self._trainer: Any = None

    def take(self, call: bytes, n_bytes: int) -> None:
        """Note one call in which the host waits for the GPU, and who made it."""
        stack, phase = self._look(sys._getframe().f_back)
        self._write(call=call.decode(), bytes=n_bytes, phase=phase, stack=stack)

    def end(self) -> None:
        self._write(call="end", bytes=0, phase="", stack=[])
        self._gpu.null_gpu_listen(None)  # Python ends before the last arrays are freed

    def _look(self, innermost: FrameType | None) -> tuple[list[str], str]:
        stack: list[str] = []
        updating: list[Any] = []
        phase, frame = "", innermost
        while frame is not None:
            code = frame.f_code
            owner: Any = frame.f_locals.get("self")
            if code.co_name == "run" and code.co_filename.endswith("training/trainer.py"):
                self._trainer = owner
                is_update = any(each is owner.updater for each in updating)
                phase = "update" if is_update else str(frame.f_locals.get("name", "set-up"))
            if code.co_name == "update":
                updating.append(owner)
            if not set(Path(code.co_filename).parts) & set(PACKAGES) and len(stack) < DEPTH:
                stack.append(f"{code.co_filename}:{frame.f_lineno} {code.co_name}")
            frame = frame.f_back
        if threading.current_thread() is not threading.main_thread():
            phase = f"thread {threading.current_thread().name}"
        return stack, phase

    def _write(self, **note: Any) -> None:
        iteration = self._trainer.updater.iteration if self._trainer is not None else -1
        note |= {"iteration": iteration, "rank": self._rank}
        note |= {"in_capture": self._gpu.null_gpu_is_capturing()}
        note |= {"counts": {name: getattr(self._gpu, f"null_gpu_{name}")() for name in COUNTS}}
        with self._path.open("a") as file:
            file.write(json.dumps(note) + "\n")
