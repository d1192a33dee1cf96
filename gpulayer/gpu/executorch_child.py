"""What ExecuTorch's runtime says of itself and of its backends. SHIPPED.

Runs as `python -c SOURCE FD` in the jobs' interpreter; `torch_child.py` tells the form of its lines. The package can be
imported where its runtime cannot: that needs PyTorch, which its wheel does not depend on. A name that the registry does
not know is "not available" without an error, so only registered names are asked about.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
from importlib import metadata
from importlib.util import find_spec
from typing import Any

_ORPHAN_LIMIT_S = 180  # the end of a child that hangs after its own parent was killed


def _ask(report: Any) -> None:
    """Ask the runtime's registry; `report` writes one line."""
    registry = importlib.import_module("executorch.runtime").Runtime.get().backend_registry
    names = [str(name) for name in registry.registered_backend_names]
    report("registered", names)
    for name in names:
        report("step", f"whether {name} is available")
        report(f"available:{name}", bool(registry.is_available(name)))


def _version() -> str | None:
    """Return the version; None for a copy that was not installed as a package."""
    try:
        return metadata.version("executorch")
    except metadata.PackageNotFoundError:
        return None


def main(descriptor: int) -> None:
    """Write the answers to `descriptor`."""

    def say(key: str, *value: object) -> None:
        os.write(descriptor, json.dumps([key, *value]).encode() + b"\n")

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash here leaves a note, no gigabytes
    try:
        # Its import may crash, hang or exit, and says of a missing torch that ExecuTorch is to be installed again.
        say("torch", find_spec("torch") is not None)
        importlib.import_module("executorch")
        say("version", _version())
        say("step", "the runtime")
        _ask(say)
    except BaseException as error:  # noqa: BLE001
        missing = isinstance(error, ModuleNotFoundError) and error.name == "executorch"
        say("missing" if missing else "import", None, f"{type(error).__name__}: {error}"[:500])
    say("done", True)


if __name__ == "__main__":
    signal.alarm(_ORPHAN_LIMIT_S)
    main(int(sys.argv[1]))
    os._exit(0)  # what frameworks do at their end is not asked for, and may hang
