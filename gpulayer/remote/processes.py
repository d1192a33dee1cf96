"""The processes of a run: who they are, and signals that cannot hit anybody else.

A process is named by (pid, start): the kernel reuses pids, but not with the same start time within one boot.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

from gpulayer.remote.failpoints import failpoint

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from typing import Any

_PR_SET_CHILD_SUBREAPER = 36
_PROC_PIDTBSDINFO = 3
_BSDINFO_SIZE = 136  # struct proc_bsdinfo (sys/proc_info.h)
_STOPPED_MACOS, _ZOMBIE_MACOS = 4, 5  # SSTOP, SZOMB
_MAX_ARGUMENTS = 1024 * 1024  # ARG_MAX (sys/syslimits.h)


class Process:
    """One process at the moment it was looked at. `start` is in the kernel's own unit and only compared."""

    __slots__ = ("group", "parent", "pid", "session", "start", "stopped", "zombie")

    def __init__(
        self, pid: int, parent: int, group: int, session: int, start: int, *, stopped: bool, zombie: bool
    ) -> None:
        """`session` is 0 where the system does not tell; `stopped` is what SIGSTOP makes of a process."""
        self.pid = pid
        self.parent = parent
        self.group = group
        self.session = session
        self.start = start
        self.stopped = stopped
        self.zombie = zombie


def look(pid: int) -> Process | None:
    """Return what the kernel says about a process, or None where there is none (or it is another user's)."""
    return _look_macos(pid) if sys.platform == "darwin" else _look_linux(pid)


def start_of(pid: int) -> int | None:
    """Return the start of a living process, or None: zombies do not live."""
    found = look(pid)
    return None if found is None or found.zombie else found.start


def living() -> dict[int, Process]:
    """Return all processes that can be seen and are no zombies."""
    found = (look(pid) for pid in _pids())
    return {process.pid: process for process in found if process is not None and not process.zombie}


def below(roots: Iterable[int], table: dict[int, Process]) -> set[int]:
    """Return the descendants of `roots`, and of these the roots themselves that live, except this process."""
    children: dict[int, list[int]] = {}
    for process in table.values():
        children.setdefault(process.parent, []).append(process.pid)
    found: set[int] = set()
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting += children.get(pid, [])
    return {pid for pid in found if pid in table and pid != os.getpid()}


def writers(paths: Collection[str]) -> set[int]:
    """Return the processes that have one of `paths` open for writing, as far as this user may see."""
    if not paths:
        return set()
    if sys.platform == "darwin":
        return _writers_macos(paths)
    found = set()
    wanted = {(status.st_dev, status.st_ino) for status in map(os.stat, paths)}
    for pid in _pids():
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    status = os.stat(f"/proc/{pid}/fd/{name}")
                    if (status.st_dev, status.st_ino) in wanted and _writes(pid, name):
                        found.add(pid)
    return found


def variable(pid: int, name: str) -> str | None:
    """Return what a process had as `name` in its environment when it was started; None where that is unknown too."""
    if sys.platform == "darwin":
        entries = _environment_macos(pid)
    else:
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                entries = file.read().split(b"\0")
        except OSError:
            return None
    prefix = os.fsencode(name + "=")
    return next((os.fsdecode(entry[len(prefix) :]) for entry in entries if entry.startswith(prefix)), None)


def describe(pid: int) -> dict[str, Any]:
    """Return what a record says of a process that is on no device: its name where the system tells it."""
    name = None
    with contextlib.suppress(OSError), open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
        name = file.read().strip()
    return {"device": None, "pid": pid, "name": name, "user": None, "memory_bytes": None}


def send(pid: int, start: int, number: int) -> None:
    """Send a signal to the process (pid, start), and to no other that has its pid by now."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # PermissionError: it is not ours any more (setuid)
        descriptor = _pidfd(pid)
        try:
            if start_of(pid) == start:
                if descriptor is None:
                    os.kill(pid, number)
                else:
                    signal.pidfd_send_signal(descriptor, number)
        finally:
            if descriptor is not None:
                os.close(descriptor)


def detach(work: Callable[[], None], keep: Collection[int], diary: str) -> None:
    """Do `work` in a process that nothing ties to this one: own session, no parent, no descriptor but `keep`.

    What it raises is written to the file `diary`.
    """
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        os.setsid()
        if os.fork() == 0:
            null = os.open(os.devnull, os.O_RDWR)
            for standard in (0, 1, 2):
                os.dup2(null, standard)
            shed({0, 1, 2, *keep})  # exec would close the others, but nothing is executed here
            os.chdir("/")
            work()
    except BaseException:  # noqa: BLE001  # a copy of the agent must not run on, and nobody is there to be told
        with open(os.open(diary, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600), "w") as file:
            import traceback

            traceback.print_exc(file=file)
    finally:
        os._exit(0)


def shed(keep: Collection[int]) -> None:
    """Close all descriptors but `keep`."""
    for name in os.listdir("/dev/fd"):
        if int(name) not in keep:
            with contextlib.suppress(OSError):  # the one that listed the folder is closed already
                os.close(int(name))


def become_subreaper() -> bool:
    """Make orphaned descendants children of this process, so that none escapes; False where that cannot be had."""
    if sys.platform == "darwin":
        return False
    try:
        failpoint("subreaper")
    except OSError:
        return False
    import ctypes

    return bool(ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


def _pidfd(pid: int) -> int | None:
    """Return a descriptor of a process, or None where the system has no such thing (macOS, old kernels, sandboxes)."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (AttributeError, OSError):
        return None


def _pids() -> list[int]:
    if sys.platform == "darwin":
        import ctypes

        libc = ctypes.CDLL(None)
        count = libc.proc_listallpids(None, 0) + 64
        raw = (ctypes.c_int * count)()
        return list(raw[: libc.proc_listallpids(raw, ctypes.sizeof(raw))])
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _writes(pid: int, descriptor: str) -> bool:
    with open(f"/proc/{pid}/fdinfo/{descriptor}", "rb") as file:
        flags = next(line.split()[1] for line in file if line.startswith(b"flags:"))
    return int(flags, 8) & os.O_ACCMODE != os.O_RDONLY


def _writers_macos(paths: Collection[str]) -> set[int]:
    """Ask lsof, whose fields `p` and `a` are a process and how it has the file open (r, w, u)."""
    import subprocess

    command = ["/usr/sbin/lsof", "-F", "pa", "--", *paths]
    answer = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False)
    found = set()
    pid = 0
    for line in answer.stdout.split():
        if line[:1] == b"p":
            pid = int(line[1:])
        elif line[:2] in (b"aw", b"au"):
            found.add(pid)
    return found


def _look_linux(pid: int) -> Process | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name in parentheses may itself hold anything, parentheses and spaces too (proc(5)).
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    stopped, zombie = fields[0] == b"T", fields[0] in (b"Z", b"X")
    parent, group, session, start = (int(fields[at]) for at in (1, 2, 3, 19))
    return Process(pid, parent, group, session, start, stopped=stopped, zombie=zombie)


def _look_macos(pid: int) -> Process | None:
    import ctypes

    raw = ctypes.create_string_buffer(_BSDINFO_SIZE)
    size = ctypes.CDLL(None).proc_pidinfo(pid, _PROC_PIDTBSDINFO, ctypes.c_uint64(0), raw, _BSDINFO_SIZE)
    if size != _BSDINFO_SIZE:
        return None

    def number(offset: int, length: int = 4) -> int:
        return int.from_bytes(raw.raw[offset : offset + length], sys.byteorder)

    start = number(120, 8) * 1_000_000 + number(128, 8)
    session = 0
    with contextlib.suppress(OSError):
        session = os.getsid(pid)
    stopped, zombie = number(4) == _STOPPED_MACOS, number(4) == _ZOMBIE_MACOS
    return Process(pid, number(16), number(100), session, start, stopped=stopped, zombie=zombie)


def _environment_macos(pid: int) -> list[bytes]:
    """Return the environment of a process of this user; none of a hardened one's (sysctl(3), KERN_PROCARGS2).

    The kernel gives the number of arguments, the program's path, padding, the arguments and then the environment.
    """
    import ctypes

    name, size = (ctypes.c_int * 3)(1, 49, pid), ctypes.c_size_t(_MAX_ARGUMENTS)
    raw = ctypes.create_string_buffer(_MAX_ARGUMENTS)
    if ctypes.CDLL(None).sysctl(name, 3, raw, ctypes.byref(size), None, ctypes.c_size_t(0)) != 0:
        return []
    data = raw.raw[: size.value]
    _, _, rest = data[4:].partition(b"\0")
    count = int.from_bytes(data[:4], sys.byteorder)
    return rest.lstrip(b"\0").split(b"\0")[count:]
