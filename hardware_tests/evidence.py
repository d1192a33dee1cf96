"""What a hardware test found out, as a file: which machine, what was run, and how it ended."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import gpulayer

SCHEMA: Final = "gpulayer.evidence/1"
FOLDER: Final = Path(__file__).parent / "evidence"

HARDWARE: Final = "passed on hardware"
VIRTUAL: Final = "passed on a virtual device"
SKIPPED: Final = "skipped"
FAILED: Final = "failed"

# Why a test has nothing to prove here. Anything else that is in the way is a failure.
SKIPS: Final[Mapping[str, str]] = {
    "no_device": "this machine has no such device",
    "framework_not_installed": "the interpreter under test does not have the framework",
    "framework_cannot": "the framework, as it is installed here, cannot use the device",
    "virtual_gpu_unusable": "the device is virtual, and using it fails",
    "processes_not_told": "the device's driver does not tell who computes on it",
    "one_device": "a gang is to span several devices, and this machine has one",
}

# Of a report's host and devices: what tells machines apart, nothing that tells whose they are.
_HOST: Final = ("os", "os_name", "os_version", "os_build", "kernel", "arch", "virtualization", "machine_model",
                "cpu_model", "cpu_logical", "memory_gb")  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Evidence:
    """One test's record. `name` is a row's, or that of a test beside the matrix; `code` is a word of SKIPS."""

    name: str
    test: str
    outcome: str = FAILED
    code: str | None = None
    message: str | None = None
    server: str | None = None
    framework: str | None = None
    report: Mapping[str, Any] | None = None
    jobs: list[dict[str, Any]] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)

    def write(self) -> Path:
        """Write the file below $GPULAYER_EVIDENCE, or beside this module, in a folder named after the machine."""
        folder = Path(os.environ.get("GPULAYER_EVIDENCE") or FOLDER) / machine_name(self.report)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        path.write_text(json.dumps(self._document(), indent=2) + "\n", encoding="utf-8")
        return path

    def _document(self) -> dict[str, Any]:
        record = asdict(self)
        report = record.pop("report") or {"host": {}, "devices": [], "frameworks": [], "notes": [], "capabilities": []}
        return {
            "schema": SCHEMA,
            "written_at": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
            "gpulayer": gpulayer.__version__,
            **record,
            "host": {key: report["host"].get(key) for key in _HOST},
            "python": (report["host"].get("python") or {}).get("version"),
            "devices": report["devices"],
            "frameworks": [
                {key: value for key, value in one.items() if key != "python"} for one in report["frameworks"]
            ],
            "capabilities": report["capabilities"],
            "notes": report["notes"],
        }


def machine_name(report: Mapping[str, Any] | None) -> str:
    """Return a folder's name for the machine of a report: `2x-nvidia-h200`, `apple-m2-max`, `linux-x86_64`."""
    if report is None:
        return "unreached"
    gpus = [device for device in report["devices"] if device["accelerator"] != "cpu"]
    if not gpus:
        return _slug([report["host"]["os"], report["host"]["arch"]])
    count = f"{len(gpus)}x" if len(gpus) > 1 else None
    return _slug([count, gpus[0]["name"] or gpus[0]["accelerator"]])


def _slug(words: Sequence[str | None]) -> str:
    return re.sub(r"[^a-z0-9_]+", "-", "-".join(word for word in words if word).lower()).strip("-")
