"""Time that goes on while a machine sleeps, and the identity of a boot."""

from __future__ import annotations

import os
import sys
import time

# Linux's CLOCK_BOOTTIME counts suspend; on macOS CLOCK_MONOTONIC does, unlike time.monotonic() (Apple's manual).
_CLOCK: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boot_time() -> float:
    """Return seconds since boot, suspend included. Comparable only within one boot."""
    return time.clock_gettime(_CLOCK)


def stamp() -> str:
    """Return the wall clock as RFC 3339 in UTC with milliseconds. For display: nothing is decided by it."""
    now = time.time()
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"


def boot_id() -> str | None:
    """Return what names this boot of this machine, or None where it cannot be read."""
    if sys.platform == "darwin":
        return _sysctl(b"kern.bootsessionuuid")
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip() or None
    except OSError:
        return None


def session_id() -> str | None:
    """Return what names the life of all processes here: the boot, and in a container the pid namespace too."""
    boot = boot_id()
    if boot is None or sys.platform == "darwin":
        return boot
    try:
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return boot


def _sysctl(name: bytes) -> str | None:
    import ctypes

    libc = ctypes.CDLL(None)
    size = ctypes.c_size_t(0)
    if libc.sysctlbyname(name, None, ctypes.byref(size), None, ctypes.c_size_t(0)) != 0:
        return None
    value = ctypes.create_string_buffer(size.value)
    if libc.sysctlbyname(name, value, ctypes.byref(size), None, ctypes.c_size_t(0)) != 0:
        return None
    return value.value.decode("ascii", "replace") or None
