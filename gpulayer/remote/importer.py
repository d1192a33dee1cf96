"""Imports the shipped modules from memory on a host; what was compiled of them is kept there for later connections.

The controller sends this module's source, followed by the sources of all shipped modules. Packages are made empty: what
`gpulayer/__init__.py` gives to its users is not for hosts.
"""

from __future__ import annotations

import contextlib
import hashlib
import marshal
import os
import sys
from importlib.machinery import ModuleSpec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import CodeType, ModuleType

_BUILDS = 4  # versions of GPUlayer, and of Python, whose compiled modules are kept
_DIGEST = 32  # bytes of SHA-256


class MemoryImporter:
    """Finder and loader of modules whose sources are held by name. Tracebacks show their lines."""

    def __init__(self, sources: Mapping[str, str], build: str) -> None:
        """Hold `sources`: each module's full name with its text. `build` is a word that no other sources have."""
        self.sources = dict(sources)
        self.packages = {
            name[:end] for name in sources for end in range(len(name)) if name[end] == "." and name[:end] not in sources
        }
        self._name = f"{build[:32]}-{sys.implementation.cache_tag}-{sys.hexversion:x}"
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
        with contextlib.suppress(OSError, EOFError, ValueError, TypeError):
            path = os.path.join(folder, self._name)
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
                data = file.read()
            if hashlib.sha256(data[_DIGEST:]).digest() == data[:_DIGEST]:
                self._kept = marshal.loads(data[_DIGEST:])  # noqa: S302  # whole, and of this Python's own making

    def keep(self) -> None:
        """Leave what was compiled meanwhile to later connections; of the builds in the folder the newest stay."""
        if not self._compiled.keys() - self._kept.keys():
            return
        data = marshal.dumps({**{name: marshal.dumps(code) for name, code in self._compiled.items()}, **self._kept})
        fresh = os.path.join(self._folder, f".{self._name}.{os.getpid()}")
        with contextlib.suppress(OSError):
            os.makedirs(self._folder, mode=0o700, exist_ok=True)
            with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                file.write(hashlib.sha256(data).digest() + data)
            os.replace(fresh, os.path.join(self._folder, self._name))
            others = [entry for entry in os.scandir(self._folder) if entry.name != self._name]
            for entry in sorted(others, key=lambda entry: entry.stat().st_mtime)[: -_BUILDS + 1]:
                os.unlink(entry.path)


def install(sources: Mapping[str, str], build: str) -> MemoryImporter:
    """Make `import` find the shipped modules, before anything that the host may have under the same names."""
    importer = MemoryImporter(sources, build)
    sys.meta_path.insert(0, importer)
    return importer
