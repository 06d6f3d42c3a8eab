"""Compile the null GPU for the installed CuPy."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
DRIVER = "libcuda.so.1"
# Libraries of a machine with a GPU that CuPy's modules need. NVRTC is the real one.
STAND_INS = re.compile(r"lib(cublas|cufft|curand|cusolver|cusparse|nccl)\.so\.\d+")
# Libraries that the real ones depend on; CuPy looks for these, too.
DEPENDENCIES = ("libcublasLt.so.13", "libnvJitLink.so.13")


def why_not() -> str | None:
    """Return why there can be no null GPU here and what to do, or None."""
    if os.uname().sysname != "Linux" or os.uname().machine != "x86_64":
        return "the null GPU is for Linux on x86-64"
    if lacking := [program for program in ("cc", "readelf") if shutil.which(program) is None]:
        return f"the null GPU needs {' and '.join(lacking)}: apt install gcc"
    if importlib.util.find_spec("cupy_backends") is None:
        return "the null GPU needs CuPy: pip install cupy-cuda13x"
    if not (headers() / "cuda_runtime_api.h").exists():
        return "the null GPU needs CUDA's headers: pip install nvidia-cuda-runtime nvidia-cuda-crt"
    return None


def headers() -> Path:
    """Return the folder of CUDA's headers that come in wheels."""
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or []) if spec else []
    return next((Path(folder, "cu13/include") for folder in folders), Path("there is none"))


def build() -> Path:
    """Return the folder of the libraries, after compiling them if necessary."""
    if reason := why_not():
        raise RuntimeError(reason)
    sources = [path.read_bytes() for path in (HERE / "build.py", *sorted(HERE.glob("*.[ch]")))]
    of_cupy = importlib.util.find_spec("cupy_backends")
    cupy = [str(of_cupy), *importlib.metadata.packages_distributions()["cupy_backends"]]
    cupy += [importlib.metadata.version(name) for name in cupy[1:]]
    digest = hashlib.sha256(b"\0".join([*sources, *map(str.encode, cupy)])).hexdigest()[:16]
    folder = HERE / "__pycache__" / digest
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            made = Path(temporary, "libraries")
            made.mkdir()
            compile_into(made)
            try:
                made.rename(folder)
            except OSError:  # another process was faster
                if not folder.exists():
                    raise
    return folder


def environment(devices: int, notes: Path) -> dict[str, str]:
    """Return the environment where a program finds this many GPUs, and notes waits in a folder."""
    path = [str(HERE / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "CHAINERMN_NULL_GPU": str(build()),
        "CHAINERMN_NULL_GPU_DEVICES": str(devices),
        "CHAINERMN_NULL_GPU_NOTES": str(notes),
    }


def compile_into(folder: Path) -> None:
    """Compile the driver with the runtime, and a stand-in for each other library CuPy loads."""
    sources = [HERE / "null_gpu.c", HERE / "capture.c"]
    run_cc(folder / DRIVER, sources, f"-I{headers()}", "-ldl", "-lpthread")
    special = (HERE / "libraries.c").read_text()
    for library, functions in needed().items():
        prefix = library.split(".")[0].removeprefix("lib")
        functions |= set(re.findall(rf"^int ({prefix}\w+)\(", special, re.MULTILINE))
        lines = [special]
        for function in sorted(functions):
            if re.search(rf"\b{function}\(", special):
                continue
            if re.search("Create|CommInit|CommSplit", function):
                lines.append(f"int {function}(void **handle) {{ *handle = handle; return 0; }}")
            elif re.search("^cublas.*[gG]emm", function):
                lines.append(f"int {function}(void) {{ return LAUNCH(of_cublas); }}")
            elif re.search("^cudnnBatchNormalization", function):
                lines.append(f"int {function}(void) {{ return LAUNCH(of_cudnn); }}")
            else:
                lines.append(f"int {function}(void) {{ return 0; }}")
        source = folder / f"{library}.c"
        source.write_text("\n".join(lines))
        versions = folder / f"{library}.map"
        names = "; ".join(sorted(functions))
        versions.write_text(f"{library} {{ global: {names}; local: *; }};")
        found_beside = ("-Wl,-rpath,$ORIGIN", f"-Wl,--version-script={versions}")
        run_cc(folder / library, [source, folder / DRIVER], *found_beside)


def needed() -> dict[str, set[str]]:
    """Return the functions that CuPy's modules and chainer_fast need from each library."""
    found: dict[str, set[str]] = {library: {"nothing"} for library in DEPENDENCIES}
    # What only chainer_fast calls.
    found["libcublas.so.13"] = {"cublasSetWorkspace_v2"}
    of_cudnn = (HERE.parents[1] / "libs/chainer_fast/src/chainer_fast/cudnn").glob("*.py")
    names = (re.findall(r"\bcudnn[A-Z]\w+", path.read_text()) for path in of_cudnn)
    found["libcudnn.so.9"] = {name for each in names for name in each}
    for name in ("cupy", "cupy_backends", "cupyx"):
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.submodule_search_locations
        for module in Path(spec.submodule_search_locations[0]).rglob("*.so"):
            shown = readelf(module, "--dynamic")
            for library in re.findall(r"NEEDED.*\[(.*)\]", shown):
                if match := STAND_INS.fullmatch(library):
                    undefined = rf" UND ({match[1]}\w+)"
                    functions = re.findall(undefined, readelf(module, "--dyn-syms"))
                    found.setdefault(library, set()).update(functions)
    return found


def readelf(file: Path, what: str) -> str:
    command = ["readelf", "--wide", what, str(file)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def run_cc(library: Path, sources: list[Path], *options: str) -> None:
    command = ["cc", "-O1", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-w"]
    subprocess.run([*command, "-o", library, *sources, *options], check=True)
