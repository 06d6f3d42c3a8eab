"""What the CUDA driver says. Through ctypes: CuPy may be what is missing."""

from __future__ import annotations

import ctypes
import glob
from typing import Any

NO_DEVICE = 100


def examine() -> dict[str, Any]:
    """Return driver version, names of GPUs and MiB of each, or what fails."""
    devices = glob.glob("/dev/nvidia[0-9]*")
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {"library": "", "error": str(error), "devices": devices}
    version, count = ctypes.c_int(), ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    code = driver.cuInit(0)
    answer: dict[str, Any] = {
        "library": f"{version.value // 1000}.{version.value % 1000 // 10}",
        "error": "" if code in (0, NO_DEVICE) else f"cuInit fails with error {code}",
        "devices": devices,
        "gpus": [],
    }
    if code:
        return answer
    driver.cuDeviceGetCount(ctypes.byref(count))
    for number in range(count.value):
        name, size = ctypes.create_string_buffer(100), ctypes.c_size_t()
        driver.cuDeviceGetName(name, 100, number)
        driver.cuDeviceTotalMem_v2(ctypes.byref(size), number)
        answer["gpus"].append([name.value.decode(), size.value // 2**20])
    return answer
