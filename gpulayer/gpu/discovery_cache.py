"""What a framework said before, kept on the host so that no plan pays for importing it again. SHIPPED."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from typing import Any

from gpulayer.gpu.discovery_report import Part

_FILE = "frameworks.json"
_ENTRIES = 16
_BYTES = 1 << 20
_FORM = {"values": dict, "errors": dict, "elapsed_ms": int}


def cache_key(facts: Any) -> str:  # noqa: ANN401  # anything that JSON can hold
    """Return the key of an answer that holds as long as `facts` are the same."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def cached(folder: str, key: str) -> Part | None:
    """Return what was kept under `key`; None where nothing is, or the file cannot be read (it is then written anew)."""
    entry = _read(folder).get(key)
    whole = isinstance(entry, dict) and all(isinstance(entry.get(name), kind) for name, kind in _FORM.items())
    return entry if whole else None


def keep(folder: str, key: str, entry: Part) -> None:
    """Keep `entry`, beside the latest few others, in one step: a reader sees the old file or the new one.

    Where the folder cannot be written nothing is kept, and the next probe asks again.
    """
    others = {name: value for name, value in _read(folder).items() if name != key}
    entries = dict([*others.items(), (key, entry)][-_ENTRIES:])
    draft = os.path.join(folder, f".{_FILE}.{os.getpid()}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
            json.dump(entries, file)
        os.replace(draft, os.path.join(folder, _FILE))
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(draft)


def _read(folder: str) -> Part:
    try:
        with os.fdopen(os.open(os.path.join(folder, _FILE), os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            entries = json.loads(file.read(_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return entries if isinstance(entries, dict) else {}
