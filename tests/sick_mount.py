"""A file system whose locks never answer, as on a sick network mount: a process that waits for one cannot be killed.

`python tests/sick_mount.py FOLDER` mounts it over FOLDER, says so and serves it until it is killed. It speaks with the
kernel's FUSE itself (linux/fuse.h): files can be made, opened and removed, and flock(2) hangs. Root alone may mount it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

POSSIBLE = os.geteuid() == 0 and os.access("/dev/fuse", os.R_OK | os.W_OK)

LOOKUP, FORGET, GETATTR, UNLINK, OPEN, RELEASE, FLUSH, INIT, SETLK, SETLKW, CREATE, BATCH_FORGET = (
    1, 2, 3, 10, 14, 18, 25, 26, 32, 33, 35, 42,
)  # fmt: skip
VERSION = (7, 31)
FLOCK_LOCKS = 1 << 10  # flock(2) is asked of us, too
ROOT = 1
IN = struct.Struct("<IIQQIIIHH")  # length, operation, request, node, user, group, process, …
OUT = struct.Struct("<IiQ")  # length, error, request


def served(device: int) -> None:
    """Answer the kernel for ever, except where it asks for a lock."""
    files: dict[str, int] = {}
    while True:
        data = os.read(device, 1 << 20)
        _, operation, request, node, *_ = IN.unpack_from(data)
        body = data[IN.size :]
        if operation in {FORGET, BATCH_FORGET, SETLK, SETLKW}:
            continue
        error, answer = 0, b""
        if operation == INIT:
            answer = struct.pack("<IIIIHHIIHHI28x", *VERSION, 1 << 17, FLOCK_LOCKS, 16, 12, 1 << 17, 1, 0, 0, 0)
        elif operation == GETATTR:
            answer = struct.pack("<QII", 1, 0, 0) + attributes(node)
        elif operation == LOOKUP:
            name = body.rstrip(b"\0").decode()
            answer = entry(files[name]) if name in files else b""
            error = 0 if answer else errno.ENOENT
        elif operation == CREATE:
            name = body[16:].rstrip(b"\0").decode()
            node = files.setdefault(name, len(files) + ROOT + 1)
            answer = entry(node) + opened(node)
        elif operation == OPEN:
            answer = opened(node)
        elif operation == UNLINK:
            files.pop(body.rstrip(b"\0").decode(), None)
        elif operation not in {RELEASE, FLUSH}:
            error = errno.ENOSYS
        os.write(device, OUT.pack(OUT.size + len(answer), -error, request) + answer)


def attributes(node: int) -> bytes:
    """Return a node's attributes (struct fuse_attr): ours, empty, a folder for everybody or a file."""
    mode = stat.S_IFDIR | 0o1777 if node == ROOT else stat.S_IFREG | 0o600
    owner = (os.geteuid(), os.getegid())
    return struct.pack("<QQQQQQIIIIIIIIII", node, 0, 0, 0, 0, 0, 0, 0, 0, mode, 1, *owner, 0, 4096, 0)


def entry(node: int) -> bytes:
    """Return a name's node (struct fuse_entry_out)."""
    return struct.pack("<QQQQII", node, 0, 0, 0, 0, 0) + attributes(node)


def opened(node: int) -> bytes:
    """Return an open file (struct fuse_open_out)."""
    return struct.pack("<QII", node, 0, 0)


@contextmanager
def mounted(folder: Path) -> Iterator[None]:
    """Mount it over a folder for as long as the context lasts; what hangs in it dies at the end."""
    with subprocess.Popen([sys.executable, __file__, folder], stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == b"mounted\n"
            yield
        finally:
            server.kill()
            subprocess.run(["umount", "--lazy", folder], check=True)


if __name__ == "__main__":
    descriptor = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={descriptor},rootmode=40000,user_id={os.geteuid()},group_id={os.getegid()}"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"sick", os.fsencode(sys.argv[1]), b"fuse", 0, options.encode()) != 0:
        sys.exit(os.strerror(ctypes.get_errno()))
    sys.stdout.write("mounted\n")
    sys.stdout.flush()
    served(descriptor)
