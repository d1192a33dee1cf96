"""The notes of a probe report: every code that a producer uses today, with its severity. SHIPPED."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from gpulayer.gpu.discovery_system import Answer

NOTES: Mapping[str, str] = {
    "child_crashed": "error",
    "child_output_invalid": "error",
    "child_timeout": "error",
    "cpu_fallback_suspected": "error",
    "cuda_built_unavailable": "warning",
    "cuda_kernel_failed": "warning",
    "cuda_wrong_result": "error",
    "device_hidden_by_env": "info",
    "driver_library_mismatch": "error",
    "driver_not_loaded": "error",
    "driver_too_old": "error",
    "executorch_backend_registered_unusable": "info",
    "executorch_import_failed": "error",
    "executorch_needs_torch": "warning",
    "executorch_not_installed": "info",
    "gpu_arch_unsupported": "warning",
    "gpu_lost": "error",
    "host_memory_includes_device": "info",
    "hostname_loopback": "info",
    "intel_mac": "info",
    "macos_too_old_for_torch": "warning",
    "memory_carveout_ignored": "info",
    "memory_not_reported": "info",
    "metal_no_device": "warning",
    "metal_probe_failed": "warning",
    "mig_enabled": "info",
    "mig_permission": "warning",
    "mlx_backend_missing": "error",
    "mlx_gpu_failed": "error",
    "mlx_import_failed": "error",
    "mlx_no_gpu": "warning",
    "mlx_not_installed": "info",
    "mlx_wrong_result": "error",
    "mps_alloc_failed": "error",
    "mps_built_unavailable": "warning",
    "mps_fallback_enabled": "info",
    "mps_not_built": "warning",
    "mps_watermark_changed": "info",
    "mps_wrong_result": "error",
    "not_macos": "info",
    "nvidia_smi_failed": "error",
    "nvidia_smi_not_found": "info",
    "nvidia_smi_timeout": "error",
    "output_truncated": "warning",
    "python_unusable": "error",
    "rocm_reports_as_cuda": "info",
    "rosetta_process": "info",
    "sandboxed_gpu": "warning",
    "system_profiler_empty": "info",
    "torch_cpu_build": "warning",
    "torch_import_failed": "error",
    "torch_not_installed": "info",
    "usable_exceeds_memory": "warning",
    "virtual_gpu": "info",
    "xpu_kernel_failed": "warning",
    "xpu_memory_unknown": "info",
    "xpu_wrong_result": "error",
}
NOTE_CODES = tuple(NOTES)

_DETAIL_LIMIT = 200


class Notes:
    """Collects notes in the order in which they were observed; the same code and subject only once."""

    def __init__(self, home: str | None = None) -> None:
        """`home` is taken out of foreign text; the user's own by default."""
        self._home = os.path.expanduser("~") if home is None else home
        self.entries: list[dict[str, Any]] = []

    def add(self, code: str, subject: str, message: str, detail: str | None = None) -> None:
        """Add one note. `message` is our own text; `detail` is foreign and is cleaned and cut."""
        if any(entry["code"] == code and entry["subject"] == subject for entry in self.entries):
            return
        self.entries.append({
            "code": code,
            "subject": subject,
            "severity": NOTES[code],
            "message": message,
            "detail": self._clean(detail),
        })  # fmt: skip

    def add_child(self, subject: str, answer: Answer) -> None:
        """Add what went wrong with a child as such; what it said is its producer's to judge."""
        outcome = answer.outcome
        if outcome.timed_out:
            self.add("child_timeout", subject, "The probe's child was cut off at its time limit.", answer.trouble)
        elif outcome.error is None and not answer.done:
            self.add("child_crashed", subject, "The probe's child ended before its answer did.", answer.trouble)
        if not answer.valid:
            self.add("child_output_invalid", subject, "A part of what the probe's child answered cannot be read.")
        if outcome.truncated:
            self.add("output_truncated", subject, "The probe's child wrote more than is kept of its output.")

    def _clean(self, text: str | None) -> str | None:
        """Foreign text without control characters and the home path, at most 200 characters."""
        if text is None:
            return None
        if len(self._home) > 1:
            text = text.replace(self._home, "~")
        text = " ".join("".join(mark if mark.isprintable() else " " for mark in text).split())
        return text[:_DETAIL_LIMIT] or None
