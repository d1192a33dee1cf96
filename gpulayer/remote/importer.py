"""Imports the shipped modules from memory on a host; what was compiled of them is kept there for later connections.

The controller sends this module's source, followed by the sources of all shipped modules. Packages are made empty: what
`gpulayer/__init__.py` gives to its users is not for hosts.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import marshal
import os
import stat
import sys
from importlib.machinery import ModuleSpec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import CodeType, ModuleType

_BUILDS = 4  # versions of GPUlayer, and of Python, whose compiled modules are kept
_BUILD = 32  # hex digits of a build that its files begin with
_DIGEST = 32  # bytes of SHA-256
_LARGEST = 16 * 1024 * 1024  # bytes that are read; all modules take less than one MiB


class MemoryImporter:
    """Finder and loader of modules whose sources are held by name. Tracebacks show their lines."""

    def __init__(self, sources: Mapping[str, str], build: str) -> None:
        """Hold `sources`: each module's full name with its text. `build` is a word that no other sources have."""
        self.sources = dict(sources)
        self.packages = {
            name[:end] for name in sources for end in range(len(name)) if name[end] == "." and name[:end] not in sources
        }
        self._name = f"{build[:_BUILD]}-{sys.implementation.cache_tag}-{sys.hexversion:x}"
        self._folder = ""
        self._kept: dict[str, bytes] = {}
        self._compiled: dict[str, CodeType] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Say that a shipped module or one of their packages comes from here."""
        del path, target
        if fullname not in self.sources and fullname not in self.packages:
            return None
        # A loader by duck type: importlib.abc is slow to import.
        return ModuleSpec(fullname, self, is_package=self.is_package(fullname))  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave the making of the module object to the import system."""

    def exec_module(self, module: ModuleType) -> None:
        """Run a module's source in its namespace."""
        module.__file__ = self.get_filename(module.__name__)
        exec(self.get_code(module.__name__), module.__dict__)  # noqa: S102  # this is what a loader does

    def is_package(self, fullname: str) -> bool:
        """Tell a package from a module."""
        return fullname in self.packages

    def get_filename(self, fullname: str) -> str:
        """Return the name under which tracebacks show a module."""
        return f"<shipped {fullname}>"

    def get_source(self, fullname: str) -> str:
        """Return a module's text; the probe hands it on to the interpreters that it asks."""
        return self.sources.get(fullname, "")

    def get_code(self, fullname: str) -> CodeType:
        """Return a module's compiled text."""
        if fullname in self._kept:
            code: CodeType = marshal.loads(self._kept[fullname])  # noqa: S302  # we wrote it, as `remember` has checked
            return code
        code = compile(self.get_source(fullname), self.get_filename(fullname), "exec", dont_inherit=True)
        self._compiled[fullname] = code
        return code

    def remember(self, folder: str) -> None:
        """Use what earlier connections have compiled of these sources and left in a folder that is this user's alone.

        Where it is not whole it is compiled again.
        """
        self._folder = folder
        with contextlib.suppress(OSError, EOFError, ValueError, TypeError), _opened(folder) as place:
            data = _read(place, self._name)
            if hashlib.sha256(data[_DIGEST:]).digest() == data[:_DIGEST]:
                self._kept = marshal.loads(data[_DIGEST:])  # noqa: S302  # whole, and of this Python's own making

    def keep(self) -> None:
        """Leave what was compiled meanwhile to later connections; of the builds in the folder the newest stay."""
        if not self._compiled.keys() - self._kept.keys():
            return
        data = marshal.dumps({**{name: marshal.dumps(code) for name, code in self._compiled.items()}, **self._kept})
        with contextlib.suppress(OSError):
            with contextlib.suppress(FileExistsError):
                os.mkdir(self._folder, 0o700)
            with _opened(self._folder) as place:
                _write(place, self._name, hashlib.sha256(data).digest() + data)
                _remove_old(place, self._name)


@contextlib.contextmanager
def _opened(folder: str) -> Iterator[int]:
    """Open the folder itself: where a link leads is somebody's own. Raises OSError."""
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not _is_ours(os.fstat(place)):
            raise PermissionError(errno.EPERM, "others could write there", folder)
        yield place
    finally:
        os.close(place)


def _is_ours(found: os.stat_result) -> bool:
    return found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _read(place: int, name: str) -> bytes:
    """Return a file of the folder, empty where it is none that we could have written. Raises OSError."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO is not waited for
    descriptor = os.open(name, flags, dir_fd=place)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or not _is_ours(found) or found.st_size > _LARGEST:
            return b""
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def _write(place: int, name: str, data: bytes) -> None:
    """Write a file of the folder, whole or not at all. Raises OSError."""
    fresh = f"{name}.{os.urandom(8).hex()}"
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=place)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        os.replace(fresh, name, src_dir_fd=place, dst_dir_fd=place)
    except OSError:
        os.unlink(fresh, dir_fd=place)  # a full disk has no room for halves
        raise


def _is_build(name: str) -> bool:
    head, dash, _ = name.partition("-")
    return len(head) == _BUILD and bool(dash) and not head.strip("0123456789abcdef")


def _remove_old(place: int, name: str) -> None:
    """Remove builds but the newest, and what an agent that was killed left half written. Raises OSError."""
    ages = {}
    for other in os.listdir(place):
        with contextlib.suppress(FileNotFoundError):  # another connection was faster, here and below
            found = os.stat(other, dir_fd=place, follow_symlinks=False)
            if other != name and _is_build(other) and stat.S_ISREG(found.st_mode):
                ages[other] = found.st_mtime
    for old in sorted(ages, key=ages.__getitem__)[: -_BUILDS + 1]:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(old, dir_fd=place)


def install(sources: Mapping[str, str], build: str) -> MemoryImporter:
    """Make `import` find the shipped modules, before anything that the host may have under the same names."""
    importer = MemoryImporter(sources, build)
    sys.meta_path.insert(0, importer)
    return importer
