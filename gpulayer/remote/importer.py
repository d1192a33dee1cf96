"""Imports the shipped modules from memory on a host, so that nothing is written to its disk.

The controller sends this module's source, followed by the sources of all shipped modules. Packages are made empty: what
`gpulayer/__init__.py` gives to its users is not for hosts.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType


class MemoryImporter:
    """Finder and loader of modules whose sources are held by name. Tracebacks show their lines."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        """Hold `sources`: each module's full name with its text."""
        self.sources = dict(sources)
        self.packages = {
            name[:end] for name in sources for end in range(len(name)) if name[end] == "." and name[:end] not in sources
        }

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
        return compile(self.get_source(fullname), self.get_filename(fullname), "exec", dont_inherit=True)


def install(sources: Mapping[str, str]) -> None:
    """Make `import` find the shipped modules, before anything that the host may have under the same names."""
    sys.meta_path.insert(0, MemoryImporter(sources))
