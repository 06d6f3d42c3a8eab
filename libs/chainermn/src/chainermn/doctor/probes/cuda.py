"""What the CUDA driver says. Through ctypes, because CuPy may be missing."""

from __future__ import annotations

import ctypes
import glob
from typing import Any

NO_DEVICE = 100


def examine() -> dict[str, Any]:
    """Return the device files, the newest CUDA that the driver supports, GPUs, and any error."""
    gpus: list[str] = []
    answer = {
        "devices": glob.glob("/dev/nvidia[0-9]*"),
        "cuda": "",
        "error": "",
        "gpus": gpus,
    }
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {**answer, "error": str(error)}
    version, count = ctypes.c_int(), ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    answer["cuda"] = f"{version.value // 1000}.{version.value % 1000 // 10}"
    if code := driver.cuInit(0):
        return {**answer, "error": "" if code == NO_DEVICE else f"cuInit fails with error {code}"}
    driver.cuDeviceGetCount(ctypes.byref(count))
    for number in range(count.value):
        name = ctypes.create_string_buffer(100)
        driver.cuDeviceGetName(name, 100, number)
        gpus.append(name.value.decode())
    return answer
