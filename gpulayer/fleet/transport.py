"""What a transport is: whatever starts the agent on a host and gives two byte streams.

`ssh` (asyncssh), `openssh` (the system's ssh) and `local` differ in nothing else; all that is said in the streams is
the session's business. Streams are handed over by callbacks: no Python step is made per line.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from gpulayer.errors import HostError


class Receiver(Protocol):
    """Takes what comes from a host. Called from the event loop; must not block."""

    def data_received(self, data: bytes) -> None:
        """Take bytes of the agent's output."""

    def stderr_received(self, data: bytes) -> None:
        """Take bytes that the shell or the agent wrote as diagnostics."""

    def ended(self, error: Exception | None, status: int | None) -> None:
        """Learn, once, that nothing more will come. `status` is the command's exit status where one was told."""


class Channel(Protocol):
    """The running agent's two streams."""

    @property
    def peer(self) -> str | None:
        """The IP address at the other end, None where that is not known."""

    def write(self, data: bytes) -> None:
        """Send bytes to the agent. Never blocks; what cannot go out yet is kept."""

    async def drain(self) -> None:
        """Wait until little enough is kept that more may be written (back-pressure). Returns at once when closed."""

    def close(self) -> None:
        """End the agent's input, at which it ends; the receiver's `ended` follows once it has."""

    def abort(self) -> None:
        """Drop the connection at once, without a word to the other side. The receiver's `ended` follows."""


class Transport(Protocol):
    """Starts the agent on one host."""

    async def start(self, receiver: Receiver) -> Channel:
        """Reach the host and start the constant command there. Raises HostError with the stage that failed."""

    def explain(self, status: int | None, stderr: bytes) -> HostError | None:
        """Return what the transport itself knows of an early end; None where it was not the transport's."""


class DroppedError(HostError):
    """The server hung up before it said what it is, as sshd does beyond MaxStartups. May be tried again later."""


def _user_known_hosts() -> tuple[Path, ...]:
    ssh = Path.home() / ".ssh"
    return (ssh / "known_hosts", ssh / "known_hosts2", Path("/etc/ssh/ssh_known_hosts"))


def _user_ssh_config() -> Path:
    return Path.home() / ".ssh" / "config"


def _local_python() -> str | None:
    folder = os.environ.get("VIRTUAL_ENV")
    return str(Path(folder) / "bin" / "python") if folder else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectOptions:
    """How connections are made. Times are seconds.

    `known_hosts` are the files that are trusted, in order; those that are missing count as empty, and a new key is
    written to the first. `accept_new` is called with a host's name and the fingerprint of a key that is unknown, which
    is then accepted and written; without it unknown keys are refused. `ssh_config` is read through `ssh -G` where it
    exists. `local_python` is the interpreter tried first on this machine where the inventory names none.
    """

    known_hosts: tuple[Path, ...] = field(default_factory=_user_known_hosts)
    accept_new: Callable[[str, str], None] | None = None
    ssh_config: Path = field(default_factory=_user_ssh_config)
    agent_socket: str | None = field(default_factory=lambda: os.environ.get("SSH_AUTH_SOCK"))
    local_python: str | None = field(default_factory=_local_python)
    connect_timeout: float = 15.0
    login_timeout: float = 20.0
    start_timeout: float = 30.0
