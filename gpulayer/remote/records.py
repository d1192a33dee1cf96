"""Small JSON files that must survive a crash: replaced whole, or written once."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import sys

from gpulayer.remote.wire import RequestError, strict_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_MAX = 4 * 1024 * 1024


class DamagedError(Exception):
    """A record is there and cannot be trusted."""


def durable(descriptor: int) -> None:
    """Force a file or folder to the disk itself. fsync on macOS leaves it in the drive's cache."""
    if sys.platform == "darwin":
        try:
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
        except OSError:  # refused by some file systems, and on folders
            pass
        else:
            return
    os.fsync(descriptor)


def durable_folder(path: str) -> None:
    """Force the names in a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # some file systems refuse it for folders (EINVAL): nothing more can be done
            durable(descriptor)
    finally:
        os.close(descriptor)


def replace(path: str, record: dict[str, Any]) -> None:
    """Write a record so that readers and crashes see the old or the new one, never a part."""
    os.replace(_written(path, record), path)
    durable_folder(os.path.dirname(path))


def write_once(path: str, record: dict[str, Any]) -> bool:
    """Write a record that never changes; False where it exists already. The first of several writers wins."""
    fresh = _written(path, record)
    try:
        os.link(fresh, path)
    except FileExistsError:
        return False
    finally:
        os.unlink(fresh)
    durable_folder(os.path.dirname(path))
    return True


def read(path: str, schema: str) -> dict[str, Any] | None:
    """Return a record, or None where there is none. Fields that a newer version has added are its own.

    Raises DamagedError where it is not what was written, and RequestError `newer` for a form of the future.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX:
            raise DamagedError(f"{path} is no record")
        data = file.read()
    try:
        record = strict_json(data)
    except ValueError:
        raise DamagedError(f"{path} is damaged") from None
    if not isinstance(record, dict) or record.get("schema") != schema:
        if isinstance(record, dict) and _is_newer(record.get("schema"), schema):
            raise RequestError(
                "newer",
                f"{path} was written by a newer version of GPUlayer ({record['schema']}, this one knows {schema})",
                fix="use that version, or a later one, with this host",
            )
        raise DamagedError(f"{path} is not of the form {schema}")
    return record


def _is_newer(found: object, schema: str) -> bool:
    name, _, version = schema.partition("/")
    theirs, _, number = found.partition("/") if isinstance(found, str) else ("", "", "")
    return theirs == name and number.isdecimal() and int(number) > int(version)


def _written(path: str, record: dict[str, Any]) -> str:
    fresh = f"{path}.{os.getpid()}"
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        with open(descriptor, "wb", buffering=0) as file:
            data = memoryview(json.dumps(record, separators=(",", ":")).encode("ascii"))
            while data:
                data = data[file.write(data) :]
            durable(descriptor)
    except BaseException:
        os.unlink(fresh)  # on a full disk it would hold what others need
        raise
    return fresh
