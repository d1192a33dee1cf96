"""NVIDIA's GPUs as CUDA's driver knows them, through ctypes: whether one shares the host's memory is told nowhere else.

SHIPPED. Runs in the frame of `discovery_child.py`, since a driver in trouble can hang or crash whoever calls it. It
makes no context, so it takes no memory of a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpulayer.gpu.discovery_child import Report


_LIBRARIES = (
    "libcuda.so.1",
    "/usr/lib/wsl/lib/libcuda.so.1",
    "/usr/local/nvidia/lib64/libcuda.so.1",
    "/usr/lib/aarch64-linux-gnu/tegra/libcuda.so.1",
)

# CUdevice_attribute of cuda.h. `numa_config` 1: the GPU's memory is a NUMA node of the host, whose number is `numa_id`.
_ATTRIBUTES = {"integrated": 18, "major": 75, "minor": 76, "numa_config": 130, "numa_id": 131}
_TEXT = 256
_UUID_BYTES = 16


def _library() -> Any:
    library = None
    for path in _LIBRARIES:
        with contextlib.suppress(OSError):
            library = library or ctypes.CDLL(path)
    return library


def _describe(driver: Any, index: int) -> dict[str, Any]:
    """Return what is known of one device, or MIG instance; what the driver does not answer is left out."""
    found: dict[str, Any] = {}
    device, number, total = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    if driver.cuDeviceGet(ctypes.byref(device), index):
        return found
    for key, attribute in _ATTRIBUTES.items():
        if driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device) == 0:
            found[key] = number.value
    if driver.cuDeviceTotalMem_v2(ctypes.byref(total), device) == 0:
        found["total"] = total.value
    words = ctypes.create_string_buffer(_TEXT)
    for key, question in (("name", driver.cuDeviceGetName), ("pci", driver.cuDeviceGetPCIBusId)):
        if question(words, _TEXT, device) == 0:
            found[key] = words.value.decode("utf-8", "replace")
    uuid = (ctypes.c_ubyte * _UUID_BYTES)()
    # The older name knows no MIG instances.
    question = getattr(driver, "cuDeviceGetUuid_v2", None) or driver.cuDeviceGetUuid
    if question(uuid, device) == 0:
        digits = bytes(uuid).hex()
        found["uuid"] = "-".join(digits[start:end] for start, end in ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32)))
    return found


def main(report: Report) -> None:
    """Write what the driver says to `report`; `init` is cuInit's result, None where there is no library."""
    driver = _library()
    code = None if driver is None else driver.cuInit(0)
    report.say("init", code)
    if code == 0:
        number = ctypes.c_int()
        if driver.cuDriverGetVersion(ctypes.byref(number)) == 0:
            report.say("cuda", number.value)
        count = number.value if driver.cuDeviceGetCount(ctypes.byref(number)) == 0 else 0
        for index in range(count):
            report.say(f"device:{index}", _describe(driver, index))
