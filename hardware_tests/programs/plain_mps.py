"""Has the Apple GPU fill a buffer, through Metal by way of ctypes: no framework."""

import ctypes
from typing import Any

from product import SIZE, tell

PATTERN = 0x5A
LENGTH = SIZE * SIZE

objects = ctypes.CDLL("/usr/lib/libobjc.A.dylib")
objects.sel_registerName.restype = ctypes.c_void_p
objects.sel_registerName.argtypes = [ctypes.c_char_p]
message = ctypes.cast(objects.objc_msgSend, ctypes.c_void_p).value or 0
pointer, count = ctypes.c_void_p, ctypes.c_ulong


class Range(ctypes.Structure):
    """NSRange."""

    _fields_ = (("location", count), ("length", count))


def send(target: Any, selector: str, result: Any = pointer, *arguments: tuple[Any, Any]) -> Any:
    types = [kind for kind, _ in arguments]
    function = ctypes.CFUNCTYPE(result, pointer, pointer, *types)(message)
    return function(target, objects.sel_registerName(selector.encode()), *(value for _, value in arguments))


metal = ctypes.CDLL("/System/Library/Frameworks/Metal.framework/Metal")
ctypes.CDLL("/System/Library/Frameworks/CoreGraphics.framework/CoreGraphics")
metal.MTLCopyAllDevices.restype = pointer
devices = metal.MTLCopyAllDevices()
visible = send(devices, "count", count)
device = send(devices, "objectAtIndex:", pointer, (count, 0))
buffer = send(device, "newBufferWithLength:options:", pointer, (count, LENGTH), (count, 0))
commands = send(send(device, "newCommandQueue"), "commandBuffer")
encoder = send(commands, "blitCommandEncoder")
part = Range(0, LENGTH)
send(encoder, "fillBuffer:range:value:", None, (pointer, buffer), (Range, part), (ctypes.c_uint8, PATTERN))
send(encoder, "endEncoding", None)
send(commands, "commit", None)
send(commands, "waitUntilCompleted", None)
found = ctypes.string_at(send(buffer, "contents"), LENGTH)
rows = [found[start : start + SIZE] for start in range(0, LENGTH, SIZE)]
name = send(send(device, "name"), "UTF8String", ctypes.c_char_p)
tell(
    wrong_rows=sum(row != bytes([PATTERN]) * SIZE for row in rows),
    version=None,
    device="mps",
    name=name.decode(),
    visible=visible,
    size=SIZE,
)
