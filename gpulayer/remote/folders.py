"""The folders that GPUlayer uses on a host: where state is kept, and where leases lie."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import signal
import stat
import sys
import time

from gpulayer.remote import records
from gpulayer.remote.wire import FULL, RequestError, refusal

_SHARED_MODE = 0o1777  # everybody may make files, nobody may remove another user's
_SELF_TEST_LIMIT = 3.0  # seconds; flock on a sick network mount hangs in a way that no signal ends

# File systems that other machines write to as well: their locks hang, lie, or fail (NFS without lockd).
_NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "9p", "ceph", "lustre", "gpfs", "glusterfs"})
_NETWORK_FUSE = (
    "fuse.sshfs",
    "fuse.glusterfs",
    "fuse.s3fs",
    "fuse.gcsfuse",
    "fuse.rclone",
    "fuse.ceph",
    "fuse.juicefs",
)


def state_folder(wanted: str | None) -> str:
    """Return this host's own state folder, made where it is missing, mode 0700.

    `wanted` (a path, `~` allowed) is the only candidate where it is given. A home may be shared by many hosts, hence a
    folder for each host below it. The folder that holds this host's runs is never left for another. Raises
    RequestError `no_state_dir` with the reason of every candidate, and `disk` where there is no room to make it.
    """
    home = os.path.expanduser("~")
    if wanted is not None:
        candidates = [os.path.expanduser(wanted)]
    elif sys.platform == "darwin":
        candidates = [os.path.join(home, "Library", "Application Support", "gpulayer"), _temporary()]
    else:
        base = os.environ.get("XDG_STATE_HOME", "")
        if not os.path.isabs(base):  # relative ones are to be ignored (XDG Base Directory Specification)
            base = os.path.join(home, ".local", "state")
        candidates = [os.path.join(base, "gpulayer"), _temporary()]
    reasons = []
    known = [candidate for candidate in candidates if _has_state(candidate)]
    for candidate in known or candidates:
        try:
            return _usable(candidate)
        except OSError as error:
            if error.errno in FULL:
                raise refusal(error) from None
            reasons.append(f"{candidate}: {error}")
        except _UnusableError as error:
            reasons.append(f"{candidate}: {error}")
    if known:
        raise RequestError(
            "no_state_dir",
            "the folder that holds the runs of this host cannot be used: " + "; ".join(reasons),
            fix="mend it: in another folder nothing would be known of them, and they could be run again",
        )
    raise RequestError(
        "no_state_dir",
        "no folder for GPUlayer's state can be used: " + "; ".join(reasons),
        fix="set state_dir in the inventory to a folder of yours on a local disk of this host",
    )


def host_identity(folder: str) -> str:
    """Return the random id of this host, 32 hex digits, kept in its state folder."""
    path = os.path.join(folder, "host_id")
    with contextlib.suppress(FileNotFoundError), open(path, encoding="ascii") as file:
        return file.read().strip()
    fresh = f"{path}.{os.getpid()}"
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(os.urandom(16).hex())
        file.flush()
        os.fsync(file.fileno())
    with contextlib.suppress(FileExistsError):  # another agent was faster: its id counts
        os.link(fresh, path)
    os.unlink(fresh)
    return host_identity(folder)


def lease_folder(wanted: str | None) -> str:
    """Return the folder of leases: the same for every user of the host, mode 1777.

    Raises RequestError `no_lease_dir` with the reason of every candidate.
    """
    if wanted is not None:
        candidates = [os.path.expanduser(wanted)]
    elif sys.platform == "darwin":
        candidates = ["/Users/Shared/gpulayer-leases"]
    else:
        candidates = ["/run/lock/gpulayer", "/var/tmp/gpulayer-leases"]  # noqa: S108  # made safe by its checks
    reasons = []
    for candidate in candidates:
        try:
            return _shared(candidate)
        except (OSError, _UnusableError) as error:
            reasons.append(f"{candidate}: {error}")
    raise RequestError(
        "no_lease_dir",
        "no folder for leases can be used: " + "; ".join(reasons),
        fix="set lease_dir in the inventory to a folder on a local disk there, with mode 1777 or not made yet",
    )


class _UnusableError(Exception):
    """Why a candidate cannot be used."""


def _temporary() -> str:
    return f"/var/tmp/gpulayer-{os.geteuid()}"  # noqa: S108  # owner and mode are checked


def _usable(root: str) -> str:
    """Return the host's folder below `root`. Raises OSError or _UnusableError."""
    os.makedirs(os.path.dirname(root), mode=0o700, exist_ok=True)
    parent = os.path.realpath(os.path.dirname(root))
    _check_parents(parent)
    folder = os.path.join(parent, os.path.basename(root))
    _private(folder)
    folder = os.path.join(folder, _machine())
    _private(folder)
    kind = _network_kind(folder)
    if kind is not None:
        raise _UnusableError(f"is on a network file system ({kind}), whose locks cannot be relied on")
    _self_test(folder)
    return folder


def _check_parents(path: str) -> None:
    while True:
        found = os.lstat(path)
        if found.st_uid not in (0, os.geteuid()):
            raise _UnusableError(f"{path} belongs to another user")
        if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
            raise _UnusableError(f"everybody may write to {path}")
        if path == "/":
            return
        path = os.path.dirname(path)


def _private(path: str) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
        records.durable_folder(os.path.dirname(path))
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise _UnusableError(f"{path} is a symbolic link or no folder")
    if found.st_uid != os.geteuid():
        raise _UnusableError(f"{path} belongs to another user")
    if found.st_mode & 0o077:
        raise _UnusableError(f"others may read or write {path} (chmod 700 it, if nobody has)")


def _machine() -> str:
    """Return a name of this machine that differs between machines that share a home."""
    name = None
    if sys.platform == "darwin":
        import ctypes

        raw, wait = ctypes.create_string_buffer(16), (ctypes.c_long * 2)(5, 0)
        if ctypes.CDLL(None).gethostuuid(raw, wait) == 0:
            name = raw.raw.hex()
    else:
        for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
            with contextlib.suppress(OSError), open(path, encoding="ascii") as file:
                name = file.read().strip()
                break
    return hashlib.sha256(f"gpulayer {name or os.uname().nodename}".encode()).hexdigest()[:16]


def _network_kind(path: str) -> str | None:
    """Return the name of the network file system that holds `path`, or None."""
    if sys.platform == "darwin":
        import ctypes

        libc, info = ctypes.CDLL(None), ctypes.create_string_buffer(4096)
        call = getattr(libc, "statfs$INODE64", libc.statfs)
        local = 0x1000  # MNT_LOCAL in f_flags, the 32 bits at 64 of struct statfs (sys/mount.h)
        if call(os.fsencode(path), info) == 0 and not int.from_bytes(info.raw[64:68], sys.byteorder) & local:
            return "not local"
        return None
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            mount, _, rest = line.partition(" - ")
            if mount.split(" ")[2] == wanted:
                kind = rest.split(" ")[0]
                return kind if kind in _NETWORK or kind.startswith(_NETWORK_FUSE) else None
    return None


def _self_test(folder: str) -> None:
    """Prove that locks exclude and links work in `folder`, in a child that can be left behind if it hangs."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(_try_locks(folder))
        except OSError as error:
            # Nothing can be proven while the disk is full; what is asked of this host may still be answered.
            os._exit(0 if error.errno in FULL else 1)
        except BaseException:  # noqa: BLE001  # the parent sees the status; nothing of the child may live on
            os._exit(1)
    give_up = time.monotonic() + _SELF_TEST_LIMIT
    pause = 0.0005
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() > give_up:
            os.kill(child, signal.SIGKILL)
            raise _UnusableError(f"locks hang there (no answer in {_SELF_TEST_LIMIT:g} s)")
        time.sleep(pause)
        pause = min(0.05, pause * 2)
    if status != 0:
        raise _UnusableError("files cannot be written, locked and linked there")


def _try_locks(folder: str) -> int:
    path = os.path.join(folder, f".self-test-{os.getpid()}")
    first = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    second = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.link(path, path + ".link")
        os.unlink(path + ".link")
        fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return 0
    finally:
        os.unlink(path)
    return 1


def _has_state(root: str) -> bool:
    """Whether this host's runs were kept below `root`; only this user's own folder counts."""
    folder = os.path.join(root, _machine())
    with contextlib.suppress(OSError):
        return os.lstat(folder).st_uid == os.geteuid() and os.path.isdir(os.path.join(folder, "runs"))
    return False


def _shared(path: str) -> str:
    parent = os.path.realpath(os.path.dirname(path))
    path = os.path.join(parent, os.path.basename(path))
    mask = os.umask(0)  # so that the folder never has another mode, which would send a second user elsewhere
    try:
        os.mkdir(path, _SHARED_MODE)
        os.chmod(path, _SHARED_MODE)  # mkdir leaves the sticky bit out on macOS
    except FileExistsError:
        pass
    finally:
        os.umask(mask)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise _UnusableError("is a symbolic link or no folder")
    if stat.S_IMODE(found.st_mode) != _SHARED_MODE:
        raise _UnusableError(f"has mode {stat.S_IMODE(found.st_mode):o}, not 1777: other users could not share it")
    kind = _network_kind(path)
    if kind is not None:
        raise _UnusableError(f"is on a network file system ({kind}), whose locks cannot be relied on")
    _self_test(path)
    return path
