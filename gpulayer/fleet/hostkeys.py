"""Which host keys are trusted: known_hosts files, pins, and the one careful way to accept a key that is new.

Never trusts silently: a key that is unknown, changed or revoked is refused, each with its own words.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gpulayer.errors import HostError, Stage
from gpulayer.fleet.sshconfig import DEFAULT_PORT
from gpulayer.fleet.sshlibrary import SSHKnownHosts, asyncssh
from gpulayer.spec import files

MAX_BYTES = 16 * 2**20
"""Bytes of a known_hosts file; a hundred thousand hosts have less."""

KINDS = (
    *("ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521"),
    *("rsa-sha2-512", "rsa-sha2-256", "sk-ssh-ed25519@openssh.com", "sk-ecdsa-sha2-nistp256@openssh.com"),
)
"""Host keys that are taken. Certificates are asked for besides where an authority is known; ssh-rsa (SHA-1) never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """What is known of one server. `name` and `port` are those under which its keys are kept.

    `pin` is a fingerprint that suffices by itself; with it the known keys do not count, revoked ones do.
    """

    name: str
    port: int
    keys: Sequence[asyncssh.SSHKey] = ()
    authorities: Sequence[asyncssh.SSHKey] = ()
    revoked: Sequence[asyncssh.SSHKey] = ()
    pin: str | None = None

    @property
    def kinds(self) -> list[str]:
        """The kinds of key to ask the server for: known ones first, so that a server with several shows a known one.

        The others come behind them, so that a server that lost the known one shows what it has instead.
        """
        known = {key.get_algorithm().replace("ssh-rsa", "rsa") for key in self.keys}
        return sorted(KINDS, key=lambda kind: not any(kind.startswith(prefix) for prefix in known))

    @property
    def pattern(self) -> str:
        """The name as known_hosts files write it."""
        return self.name if self.port == DEFAULT_PORT else f"[{self.name}]:{self.port}"


@dataclass(slots=True)
class HostKeys:
    """The known_hosts files, read once. A new key is written to the first of them."""

    paths: Sequence[Path]
    accept_new: Callable[[str, str], None] | None = None
    _known: SSHKnownHosts | None = field(default=None, init=False)

    def trust(self, host: str, name: str, port: int, pin: str | None) -> Trust:
        """Return what is known of the server `name`. Raises HostError where a file cannot be read as known_hosts."""
        if self._known is None:
            self._known = self._read(host)
        trust = Trust(name=name.lower(), port=port, pin=pin)
        # As ssh does, the bare name counts where nothing is known for the port; what either revokes is revoked.
        # (asyncssh's own lookup forgets a revocation for the port when it goes on to the bare name.)
        known = self._known.match(trust.pattern, "", None)
        bare = self._known.match(trust.name, "", None)
        trusted = known if known[0] or known[1] else bare
        revoked = [*known[2], *bare[2]]
        if pin is not None:
            return replace(trust, revoked=revoked)
        return replace(trust, keys=trusted[0], authorities=trusted[1], revoked=revoked)

    def _read(self, host: str) -> SSHKnownHosts:
        known = SSHKnownHosts()
        for path in self.paths:
            try:
                if not path.exists() or path.samefile(os.devnull):  # a link to it is how some keep no such file
                    continue
                text = files.read(path, MAX_BYTES).decode(errors="surrogateescape")
            except OSError as error:
                raise HostError(host, Stage.HOST_KEY, f"cannot read {path} ({error.strerror})") from error
            except files.UnusableFileError as error:
                fix = "put a file of known host keys there, or remove what is there"
                raise HostError(host, Stage.HOST_KEY, f"cannot read {path}: {error}", fix=fix) from error
            for number, line in enumerate(text.splitlines(), 1):
                try:
                    known.load(line)
                except ValueError as error:
                    raise HostError(
                        host,
                        Stage.HOST_KEY,
                        f"{path}:{number}: this is no entry of known_hosts",
                        fix="repair or remove the line; a damaged file might hide a revoked key",
                    ) from error
        return known

    def remember(self, host: str, trust: Trust, key: asyncssh.SSHKey) -> bool:
        """Write a key that was accepted and proven to the first file; False where it is there by now.

        Several connections may meet one new server at the same time. Raises HostError where writing fails.
        """
        path = self.paths[0]
        line = f"{trust.pattern} {key.export_public_key('openssh').decode().split(' ', 2)[0]} {_blob(key)}\n"
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with open(descriptor, "r+b") as file:  # noqa: PTH123  # opened by descriptor
                old = file.read()
                is_new = line.encode() not in old
                if is_new:
                    file.write((b"\n" if old and not old.endswith(b"\n") else b"") + line.encode())
        except OSError as error:
            raise HostError(host, Stage.HOST_KEY, f"cannot write the new key to {path} ({error.strerror})") from error
        if self._known is not None:
            self._known.load(line)
        return is_new


def _blob(key: asyncssh.SSHKey) -> str:
    return key.export_public_key("openssh").decode().split()[1]


def unknown_key(host: str, trust: Trust, key: asyncssh.SSHKey) -> HostError:
    """Return the error for a server of which no key is known."""
    return HostError(
        host,
        Stage.HOST_KEY,
        f"the key of {trust.pattern} is unknown: {key.get_algorithm()} {key.get_fingerprint()}",
        fix="compare the fingerprint with the host's own (ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub there), then"
        " repeat with --accept-new-host-key, or pin it in the inventory (`host_key`)",
    )


def changed_key(host: str, trust: Trust, key: asyncssh.SSHKey) -> HostError:
    """Return the error for a server that shows another key than the one that is known or pinned."""
    known = trust.pin or ", ".join(f"{one.get_algorithm()} {one.get_fingerprint()}" for one in trust.keys)
    return HostError(
        host,
        Stage.HOST_KEY,
        f"the key of {trust.pattern} has CHANGED: it shows {key.get_algorithm()} {key.get_fingerprint()},"
        f" {'pinned' if trust.pin else 'known'} is {known}",
        fix="somebody may stand between you and the host; where the host was really set up anew, "
        + (
            "change host_key in the inventory"
            if trust.pin
            else f"remove the old key: ssh-keygen -R '{trust.pattern}', and repeat with --accept-new-host-key"
        ),
    )


def revoked_key(host: str, trust: Trust, key: asyncssh.SSHKey | None) -> HostError:
    """Return the error for a key that known_hosts marks as revoked."""
    shown = f" ({key.get_algorithm()} {key.get_fingerprint()})" if key else ""
    return HostError(
        host,
        Stage.HOST_KEY,
        f"the key of {trust.pattern} is REVOKED{shown}",
        fix="known_hosts marks this key as stolen or retired: give the host a new key; never remove the @revoked line",
    )
