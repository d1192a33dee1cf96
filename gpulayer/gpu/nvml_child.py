"""NVIDIA's GPUs as NVML knows them, through ctypes. SHIPPED.

Runs in the frame of `discovery_child.py`, since a driver in trouble can hang or crash whoever calls it. Every call's
return code is kept: 0 is success; others are constants of nvml.h (3 not supported, 4 no permission, 9 driver not
loaded, 12 library not found, 15 GPU is lost, 18 library and driver differ).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpulayer.gpu.discovery_child import Report


_LIBRARIES = (
    "libnvidia-ml.so.1",
    "/usr/lib/wsl/lib/libnvidia-ml.so.1",
    "/usr/local/nvidia/lib64/libnvidia-ml.so.1",
    "/usr/local/cuda/compat/libnvidia-ml.so.1",
)
_LIBRARY_NOT_FOUND = 12
_FUNCTION_NOT_FOUND = 13
_TEXT = 96  # longer than every buffer size that nvml.h names
_PROCESSES = 1024  # more than one device runs
_NOT_AVAILABLE = 2**64 - 1  # NVML_VALUE_NOT_AVAILABLE


class _Pci(ctypes.Structure):
    """`nvmlPciInfo_t` of nvml.h, version 3."""

    _fields_ = (
        ("bus_id_legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("pci_device_id", ctypes.c_uint),
        ("pci_subsystem_id", ctypes.c_uint),
        ("bus_id", ctypes.c_char * 32),
    )


class _Memory(ctypes.Structure):
    """`nvmlMemory_t` of nvml.h; bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Memory2(ctypes.Structure):
    """`nvmlMemory_v2_t` of nvml.h; bytes. What the driver has reserved for itself is not in `used`."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _Process(ctypes.Structure):
    """`nvmlProcessInfo_t` of nvml.h, version 3; bytes."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("instance", ctypes.c_uint),
        ("part", ctypes.c_uint),
    )


class _Addressing(ctypes.Structure):
    """`nvmlDeviceAddressingMode_v1_t` of nvml.h: 0 none, 1 HMM, 2 ATS."""

    _fields_ = (("version", ctypes.c_uint), ("value", ctypes.c_uint))


class _Nvml:
    """The library; each question returns (value or None, NVML's return code)."""

    def __init__(self) -> None:
        self._library: ctypes.CDLL | None = None
        for path in _LIBRARIES:
            try:
                self._library = ctypes.CDLL(path)
            except OSError:
                continue
            break

    def call(self, name: str, *arguments: Any) -> int:
        if self._library is None:
            return _LIBRARY_NOT_FOUND
        function = getattr(self._library, name, None)
        return _FUNCTION_NOT_FOUND if function is None else int(function(*arguments))

    def text(self, name: str, *handle: Any) -> tuple[str | None, int]:
        buffer = ctypes.create_string_buffer(_TEXT)
        code = self.call(name, *handle, buffer, ctypes.c_uint(_TEXT))
        return (buffer.value.decode("utf-8", "replace") or None if code == 0 else None), code

    def filled(self, name: str, value: Any, *handle: Any) -> tuple[Any, int]:
        code = self.call(name, *handle, ctypes.byref(value))
        return (value if code == 0 else None), code


def _describe(nvml: _Nvml, handle: ctypes.c_void_p) -> dict[str, Any]:
    """Everything that the report needs of one GPU or MIG instance; `codes` has the return code of what failed."""
    gpu: dict[str, Any] = {"codes": {}}

    def ask(key: str, answer: tuple[Any, int], value: Callable[[Any], Any] = lambda found: found) -> None:
        found, code = answer
        gpu[key] = None if found is None else value(found)
        if code:
            gpu["codes"][key] = code

    ask("uuid", nvml.text("nvmlDeviceGetUUID", handle))
    ask("name", nvml.text("nvmlDeviceGetName", handle))
    ask("memory", nvml.filled("nvmlDeviceGetMemoryInfo", _Memory(), handle), lambda it: [it.total, it.free])
    memory = _Memory2(version=ctypes.sizeof(_Memory2) | 2 << 24)
    found, _ = nvml.filled("nvmlDeviceGetMemoryInfo_v2", memory, handle)
    gpu["used"] = found.used if found else None
    gpu["processes"] = _processes(nvml, handle)
    return gpu


def _processes(nvml: _Nvml, handle: ctypes.c_void_p) -> list[list[int | None]] | None:
    """Return the compute processes as [pid, bytes]; None where the driver does not tell them."""
    count, listed = ctypes.c_uint(_PROCESSES), (_Process * _PROCESSES)()
    if nvml.call("nvmlDeviceGetComputeRunningProcesses_v3", handle, ctypes.byref(count), listed) != 0:
        return None
    return [[it.pid, None if it.used == _NOT_AVAILABLE else it.used] for it in listed[: count.value]]


def _describe_physical(nvml: _Nvml, handle: ctypes.c_void_p) -> dict[str, Any]:
    gpu = _describe(nvml, handle)
    pci, _ = nvml.filled("nvmlDeviceGetPciInfo_v3", _Pci(), handle)
    gpu["pci"] = pci.bus_id.decode("ascii", "replace") if pci else None
    major, minor = ctypes.c_int(), ctypes.c_int()
    code = nvml.call("nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor))
    gpu["compute"] = f"{major.value}.{minor.value}" if code == 0 else None
    addressing = _Addressing(version=ctypes.sizeof(_Addressing) | 1 << 24)
    found, _ = nvml.filled("nvmlDeviceGetAddressingMode", addressing, handle)
    gpu["ats"] = found.value == 2 if found else None  # noqa: PLR2004  # ATS, as above
    current, pending = ctypes.c_uint(), ctypes.c_uint()
    code = nvml.call("nvmlDeviceGetMigMode", handle, ctypes.byref(current), ctypes.byref(pending))
    gpu["mig"] = bool(current.value) if code == 0 else None
    gpu["instances"] = _instances(nvml, handle) if gpu["mig"] else []
    return gpu


def _instances(nvml: _Nvml, parent: ctypes.c_void_p) -> list[dict[str, Any]]:
    count, _ = nvml.filled("nvmlDeviceGetMaxMigDeviceCount", ctypes.c_uint(), parent)
    found = []
    for index in range(count.value if count else 0):
        handle = ctypes.c_void_p()
        if nvml.call("nvmlDeviceGetMigDeviceHandleByIndex", parent, ctypes.c_uint(index), ctypes.byref(handle)) == 0:
            found.append(_describe(nvml, handle))
    return found


def main(report: Report) -> None:
    """Write what NVML says to `report`."""
    nvml = _Nvml()
    code = nvml.call("nvmlInit_v2")
    report.say("init", code)
    if code == 0:
        report.say("driver", nvml.text("nvmlSystemGetDriverVersion")[0])
        cuda, _ = nvml.filled("nvmlSystemGetCudaDriverVersion_v2", ctypes.c_int())
        report.say("cuda", cuda.value if cuda else None)
        count, _ = nvml.filled("nvmlDeviceGetCount_v2", ctypes.c_uint())
        for index in range(count.value if count else 0):
            handle = ctypes.c_void_p()
            code = nvml.call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
            report.say(f"gpu:{index}", _describe_physical(nvml, handle) if code == 0 else {"codes": {"handle": code}})
