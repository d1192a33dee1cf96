"""Leases of GPUs and CPU slots: locks that the host's kernel holds, and frees when their holders end.

They lie in one folder that all users and controllers of a host share. A lease file is made once, readable by all,
never written and never unlinked; whoever has it locked holds the device. Who that is stands beside it, for display.

A device is locked exclusively, or shared by jobs that may share it (`share` > 1), each of which has one of its places.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import stat
import time

from gpulayer.remote.wire import RequestError

_PATIENCE = 0.1  # seconds; a survey holds each lock for a moment to see whether it is free
_PAUSE = 0.01
_MAX_NOTE = 4096


class Leases:
    """The leases in one folder."""

    def __init__(self, folder: str) -> None:
        """`folder` exists, with mode 1777."""
        self._folder = folder

    def take_devices(self, devices: list[str], share: int, run: str) -> list[int]:
        """Lock all of `devices` or none, and return the descriptors that hold them.

        Raises RequestError `busy` with the device's `holder`.
        """
        held: list[int] = []
        try:
            for device in sorted(devices):
                lease = _device(device)
                exclusive = share == 1
                held.append(self._take([lease], run, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH, device))
                if not exclusive:
                    places = [f"{lease}.place-{number}" for number in range(share)]
                    held.append(self._take(places, run, fcntl.LOCK_EX, device))
        except BaseException:
            for descriptor in held:
                os.close(descriptor)
            raise
        return held

    def take_slot(self, slots: int, run: str) -> list[int]:
        """Lock one of the host's `slots` CPU slots. Raises RequestError `busy`."""
        return [self._take([f"slot-{number}" for number in range(slots)], run, fcntl.LOCK_EX, "every CPU slot")]

    def holders(self) -> tuple[dict[str, str], int]:
        """Return who holds each device that is held, by its id, and how many CPU slots are held."""
        devices: dict[str, str] = {}
        slots = 0
        for name in sorted(os.listdir(self._folder)):
            if name.startswith("device-") and ".place-" not in name and ".holder-" not in name and self._held(name):
                devices[_device_id(name)] = self._holder(name)
            elif name.startswith("slot-") and ".holder-" not in name and self._held(name):
                slots += 1
        return devices, slots

    def _take(self, names: list[str], run: str, kind: int, what: str) -> int:
        """Lock the first free file of `names`."""
        give_up = time.monotonic() + _PATIENCE
        while True:
            for name in names:
                descriptor = self._lock(name, kind)
                if descriptor is not None:
                    self._note(name, run)
                    return descriptor
            if time.monotonic() > give_up:
                break
            time.sleep(_PAUSE)
        holder = self._holder(names[0])
        raise RequestError("busy", f"{what} is held by {holder}", fix="wait for it, or cancel that run", holder=holder)

    def _lock(self, name: str, kind: int) -> int | None:
        """Return a descriptor that holds `name`, or None while somebody else does."""
        path = os.path.join(self._folder, name)
        while True:
            descriptor = self._open(path)
            try:
                fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
                # Somebody may have unlinked the file in between: a lock on what has no name excludes nobody.
                if os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False)):
                    return descriptor
            except BlockingIOError:
                os.close(descriptor)
                return None
            except FileNotFoundError:
                pass
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def _open(self, path: str) -> int:
        """Open a lease file, made where it is missing. Everybody may lock it, nobody may write to it."""
        mask = os.umask(0)  # so that the file never has another mode, on which another user would stumble
        try:
            return os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o444)
        except FileExistsError:
            pass
        finally:
            os.umask(mask)
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO would block
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
            return descriptor
        os.close(descriptor)
        raise RequestError("system", f"{path} is no lease file", fix="remove it, when nothing runs on this host")

    def _held(self, name: str) -> bool:
        descriptor = self._lock(name, fcntl.LOCK_EX)
        if descriptor is None:
            return True
        os.close(descriptor)
        return False

    def _note(self, name: str, run: str) -> None:
        """Leave word of the holder, in a file of our own: in a sticky folder nobody can replace another user's."""
        path = os.path.join(self._folder, f"{name}.holder-{os.geteuid()}")
        fresh = f"{path}.{os.getpid()}"
        with open(
            os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w", encoding="ascii"
        ) as file:
            os.fchmod(file.fileno(), 0o644)
            json.dump({"run": run}, file)
        os.replace(fresh, path)

    def _holder(self, name: str) -> str:
        """Return the run that took `name` last, by the newest note on it."""
        notes = [
            entry for entry in os.scandir(self._folder) if re.fullmatch(re.escape(name) + r"\.holder-\d+", entry.name)
        ]
        for entry in sorted(notes, key=lambda entry: entry.stat(follow_symlinks=False).st_mtime_ns, reverse=True):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                descriptor = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
                with open(descriptor, "rb") as file:
                    return str(json.loads(file.read(_MAX_NOTE))["run"])[:200]
        return "an unknown holder"


def _device(device: str) -> str:
    return "device-" + re.sub(r"[^A-Za-z0-9-]", lambda found: f"%{ord(found[0]):x};", device)


def _device_id(name: str) -> str:
    return re.sub(r"%([0-9a-f]+);", lambda found: chr(int(found[1], 16)), name[len("device-") :])
