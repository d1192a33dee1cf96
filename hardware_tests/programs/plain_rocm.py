"""Has the AMD GPU that GPUlayer chose fill its memory, through HIP's own library: no framework."""

import ctypes
import os

from product import SIZE, tell

PATTERN = 0x5EED
DEVICE_TO_HOST = 2  # hipMemcpyKind
hip = ctypes.CDLL("libamdhip64.so")


def call(name: str, *arguments: object) -> None:
    code = getattr(hip, name)(*arguments)
    if code:
        raise SystemExit(f"{name} failed with HIP error {code}")


count, version = ctypes.c_int(), ctypes.c_int()
name = ctypes.create_string_buffer(256)
memory = ctypes.c_void_p()
words = (ctypes.c_uint32 * (SIZE * SIZE))()
size = ctypes.c_size_t(ctypes.sizeof(words))
call("hipInit", 0)
call("hipDriverGetVersion", ctypes.byref(version))
call("hipGetDeviceCount", ctypes.byref(count))
local = int(os.environ.get("LOCAL_RANK", "0"))
call("hipSetDevice", local)
call("hipDeviceGetName", name, len(name), local)
call("hipMalloc", ctypes.byref(memory), size)
call("hipMemsetD32", memory, PATTERN, ctypes.c_size_t(len(words)))
call("hipMemcpy", words, memory, size, DEVICE_TO_HOST)
call("hipFree", memory)
rows = [words[start : start + SIZE] for start in range(0, len(words), SIZE)]
tell(
    wrong_rows=sum(any(word != PATTERN for word in row) for row in rows),
    version=str(version.value),
    device="rocm",
    name=name.value.decode(),
    visible=count.value,
    size=SIZE,
)
