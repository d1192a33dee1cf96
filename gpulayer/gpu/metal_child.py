"""The Apple GPUs that Metal enumerates, through ctypes. SHIPPED.

Runs in the frame of `discovery_child.py`, since a wrong message send crashes the interpreter. `MTLCopyAllDevices` comes
first: `MTLCreateSystemDefaultDevice` gives nil in many sessions without a screen, while the former can be empty in
sandboxes and some virtual machines.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpulayer.gpu.discovery_child import Report


# MTLGPUFamily of MTLDevice.h, newest first.
_FAMILIES = (
    *((f"apple{number}", 1000 + number) for number in range(10, 0, -1)),
    ("mac2", 2002),
)


class _Objects:
    """The Objective-C runtime. Every send names its types: arm64 has no variadic form of objc_msgSend."""

    def __init__(self) -> None:
        self._runtime = ctypes.CDLL("/usr/lib/libobjc.A.dylib")
        self._runtime.sel_registerName.restype = ctypes.c_void_p
        self._runtime.sel_registerName.argtypes = [ctypes.c_char_p]
        self._send = ctypes.cast(self._runtime.objc_msgSend, ctypes.c_void_p).value

    def send(self, target: int, selector: str, result: Any, *arguments: tuple[Any, Any]) -> Any:
        types = [kind for kind, _ in arguments]
        function = ctypes.CFUNCTYPE(result, ctypes.c_void_p, ctypes.c_void_p, *types)(self._send or 0)
        name = self._runtime.sel_registerName(selector.encode())
        return function(target, name, *(value for _, value in arguments))

    def responds(self, target: int, selector: str) -> bool:
        name = self._runtime.sel_registerName(selector.encode())
        return bool(self.send(target, "respondsToSelector:", ctypes.c_bool, (ctypes.c_void_p, name)))


def _devices(objects: _Objects) -> list[int]:
    metal = ctypes.CDLL("/System/Library/Frameworks/Metal.framework/Metal")
    ctypes.CDLL("/System/Library/Frameworks/CoreGraphics.framework/CoreGraphics")
    metal.MTLCopyAllDevices.restype = ctypes.c_void_p
    array = metal.MTLCopyAllDevices()
    count = objects.send(array, "count", ctypes.c_ulong) if array else 0
    found = [objects.send(array, "objectAtIndex:", ctypes.c_void_p, (ctypes.c_ulong, index)) for index in range(count)]
    if not found:
        metal.MTLCreateSystemDefaultDevice.restype = ctypes.c_void_p
        found = [metal.MTLCreateSystemDefaultDevice()]
    return [device for device in found if device]


def _describe(objects: _Objects, device: int) -> dict[str, Any]:
    text = objects.send(objects.send(device, "name", ctypes.c_void_p), "UTF8String", ctypes.c_char_p)
    facts: dict[str, Any] = {"name": text.decode("utf-8", "replace") if text else None}
    for key, selector, kind in (
        ("working_set", "recommendedMaxWorkingSetSize", ctypes.c_uint64),
        ("max_buffer", "maxBufferLength", ctypes.c_uint64),
        ("unified", "hasUnifiedMemory", ctypes.c_bool),
        ("low_power", "isLowPower", ctypes.c_bool),
    ):
        facts[key] = objects.send(device, selector, kind) if objects.responds(device, selector) else None
    supports = objects.responds(device, "supportsFamily:")
    facts["family"] = next(
        (
            name
            for name, number in _FAMILIES
            if supports and objects.send(device, "supportsFamily:", ctypes.c_bool, (ctypes.c_long, number))
        ),
        None,
    )
    return facts


def main(report: Report) -> None:
    """Write what Metal says to `report`."""
    objects = _Objects()
    report.say("devices", [_describe(objects, device) for device in _devices(objects)])
