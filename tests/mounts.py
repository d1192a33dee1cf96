"""File systems in memory for tests that need a small, full or frozen disk: root mounts them, or sudo does."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    """Mount a tmpfs of this user's at `folder` for as long as the context lasts."""
    root = [] if os.geteuid() == 0 else ["sudo", "--non-interactive"]
    options = f"{options},uid={os.geteuid()},gid={os.getegid()}"
    subprocess.run([*root, "mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run([*root, "umount", "--lazy", folder], check=True)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Let a file system that was mounted here take nothing for as long as the context lasts; nothing may be open."""
    root = [] if os.geteuid() == 0 else ["sudo", "--non-interactive"]
    subprocess.run([*root, "mount", "-o", "remount,ro", folder], check=True)
    try:
        yield
    finally:
        subprocess.run([*root, "mount", "-o", "remount,rw", folder], check=True)
