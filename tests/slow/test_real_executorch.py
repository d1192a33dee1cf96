"""The real ExecuTorch of this interpreter, whose wheel takes minutes to install: `make test-slow` runs this group."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from gpulayer.gpu.discovery import probe

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    found: dict[str, Any] = probe(sys.executable, ["executorch"])
    return found


def test_executorch_is_proven_by_its_own_registry(report: dict[str, Any]) -> None:
    (entry,) = report["frameworks"]
    assert (entry["status"], entry["signal"]) == ("ok", None)
    assert entry["version"]
    assert {"executorch", "executorch.xnnpack"} <= set(report["capabilities"])
    assert "XnnpackBackend" in entry["detail"]["registered"]
    assert not {"executorch.coreml", "executorch.mlx", "executorch.metal"} & set(report["capabilities"])


def test_what_is_registered_and_cannot_be_used_is_a_note_and_no_capability(report: dict[str, Any]) -> None:
    """Qualcomm's backend calls itself available on every host, and OpenVINO's lacks its library."""
    registered = report["frameworks"][0]["detail"]["registered"]
    assert {"QnnBackend", "OpenvinoBackend"} <= set(registered)
    notes = [note["subject"] for note in report["notes"] if note["code"] == "executorch_backend_registered_unusable"]
    assert notes == ["OpenvinoBackend"]
    assert set(report["capabilities"]) == {"executorch", "executorch.xnnpack"}
