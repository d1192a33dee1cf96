"""A stand-in for ExecuTorch's runtime: its registry is what `executorch.json` beside it says, {name: available}."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_said: dict[str, bool] = json.loads((Path(__file__).parent / "executorch.json").read_text())


class Runtime:
    @staticmethod
    def get() -> Any:
        registry = SimpleNamespace(
            registered_backend_names=list(_said), is_available=lambda name: _said.get(name, False)
        )
        return SimpleNamespace(backend_registry=registry)
