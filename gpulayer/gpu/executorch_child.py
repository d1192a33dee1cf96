"""What ExecuTorch's runtime says of itself and of its backends. SHIPPED.

Runs in the frame of `discovery_child.py`, in the jobs' interpreter. The package can be imported where its runtime
cannot: that needs PyTorch, which its wheel does not depend on. A name that the registry does not know is "not
available" without an error, so only registered names are asked about.
"""

from __future__ import annotations

import importlib
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpulayer.gpu.discovery_child import Report


def _ask(report: Report) -> None:
    """Ask the package, then its runtime's registry."""
    # The runtime's import may crash, hang or exit; of a missing torch it says that ExecuTorch is to be installed again.
    report.say("torch", find_spec("torch") is not None)
    importlib.import_module("executorch")
    report.say("version", _version())
    report.say("step", "the runtime")
    registry = importlib.import_module("executorch.runtime").Runtime.get().backend_registry
    names = [str(name) for name in registry.registered_backend_names]
    report.say("registered", names)
    for name in names:
        report.say("step", f"whether {name} is available")
        report.say(f"available:{name}", bool(registry.is_available(name)))


def _version() -> str | None:
    """Return the version; None for a copy that was not installed as a package."""
    try:
        return metadata.version("executorch")
    except metadata.PackageNotFoundError:
        return None


def main(report: Report) -> None:
    """Write the answers to `report`."""
    report.load("executorch", lambda: _ask(report))
