"""Has the GPU that GPUlayer chose fill its memory, through the driver's own library: no framework."""

import ctypes
import os

from product import SIZE, tell

PATTERN = 0x5EED
driver = ctypes.CDLL("libcuda.so.1")


def call(name: str, *arguments: object) -> None:
    code = getattr(driver, name)(*arguments)
    if code:
        raise SystemExit(f"{name} failed with CUDA error {code}")


count, device, version = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
name = ctypes.create_string_buffer(256)
uuid = (ctypes.c_ubyte * 16)()
context, memory = ctypes.c_void_p(), ctypes.c_uint64()
words = (ctypes.c_uint32 * (SIZE * SIZE))()
call("cuInit", 0)
call("cuDriverGetVersion", ctypes.byref(version))
call("cuDeviceGetCount", ctypes.byref(count))
call("cuDeviceGet", ctypes.byref(device), int(os.environ.get("LOCAL_RANK", "0")))
call("cuDeviceGetName", name, len(name), device)
call("cuDeviceGetUuid_v2", uuid, device)  # a MIG instance has its own
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
call("cuCtxSetCurrent", context)
call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(ctypes.sizeof(words)))
call("cuMemsetD32_v2", memory, ctypes.c_uint(PATTERN), ctypes.c_size_t(len(words)))
call("cuMemcpyDtoH_v2", words, memory, ctypes.c_size_t(ctypes.sizeof(words)))
call("cuMemFree_v2", memory)
rows = [words[start : start + SIZE] for start in range(0, len(words), SIZE)]
tell(
    wrong_rows=sum(any(word != PATTERN for word in row) for row in rows),
    version=f"{version.value // 1000}.{version.value % 1000 // 10}",
    device="cuda",
    name=name.value.decode(),
    uuid="-".join(bytes(uuid).hex()[start:end] for start, end in ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32))),
    visible=count.value,
    size=SIZE,
)
