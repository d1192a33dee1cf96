"""The inventory: which hosts there are and how each is reached."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


class TransportKind(enum.StrEnum):
    """How the agent is started: asyncssh, the system's ssh, or this machine itself."""

    SSH = "ssh"
    OPENSSH = "openssh"
    LOCAL = "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What the probe must find on a host; where it does not hold the host is refused with code `expect`."""

    accelerator: str | None = None
    count: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine of the inventory. Paths may start with `~`, which is the remote user's home (identity_file: ours)."""

    name: str
    transport: TransportKind = TransportKind.SSH
    address: str | None = None
    port: int | None = None
    user: str | None = None
    identity_file: str | None = None
    jump: str | None = None
    host_key: str | None = None
    python: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    expect: Expectation | None = None
    private_address: str | None = None
    max_jobs: int | None = None
    drain: bool = False
    state_dir: str | None = None
    lease_dir: str | None = None

    @property
    def target(self) -> str:
        """The address that is connected to: the host's own name where none is given."""
        return self.address or self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """The hosts by name, in the order of the file. `path` is None where this machine alone is the inventory."""

    hosts: Mapping[str, Host]
    path: Path | None = None
