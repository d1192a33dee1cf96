"""Which keys are offered to a server: the inventory's, ssh's usual ones, and those that a running ssh agent holds."""

from __future__ import annotations

import stat
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from gpulayer.errors import HostError, Stage
from gpulayer.fleet.sshconfig import Target
from gpulayer.fleet.sshlibrary import SSHAgentClient, asyncssh


class Identities:
    """The keys for one login, in the order in which they are tried. `close` ends the talk with the agent."""

    def __init__(self, target: Target) -> None:
        """`target` says which files and which agent may be used."""
        self._target = target
        self._agent: SSHAgentClient | None = None
        self.keys: list[Any] = []
        self._passed_over: list[str] = []

    async def load(self) -> None:
        """Read files and ask the agent. Raises HostError at stage `authenticate` where nothing can be offered."""
        target = self._target
        held = await self._held_by_agent()
        if target.identity is not None:
            self._load_required(target.identity, held)
            return
        for path in target.identities:
            self._load_candidate(path, held)
        if not target.only_identities:
            self.keys += [key for key in held if key not in self.keys]
        if not self.keys:
            tried = "; ".join(self._passed_over) or "no key file and no agent with keys"
            raise self._error(
                f"there is no key to log in with ({tried})",
                fix="set identity_file in the inventory, or load a key into the agent with ssh-add",
            )

    def close(self) -> None:
        """End the connection to the agent."""
        if self._agent is not None:
            self._agent.close()

    async def _held_by_agent(self) -> Sequence[asyncssh.SSHKeyPair]:
        if self._target.agent_socket is None:
            return []
        try:
            self._agent = await asyncssh.connect_agent(self._target.agent_socket)
            return await self._agent.get_keys()
        except (OSError, ValueError) as error:
            self._passed_over.append(f"the agent at {self._target.agent_socket} does not answer: {error}")
            return []

    def _load_required(self, path: Path, held: Sequence[asyncssh.SSHKeyPair]) -> None:
        """Take the inventory's key: from its file, or from the agent where it has a passphrase."""
        try:
            refusal = _unsafe(path)
            if refusal is not None:
                raise self._error(f"identity file {path} {refusal[0]}", fix=refusal[1])
            self.keys.append(self._read(path))
        except OSError as error:
            raise self._error(
                f"cannot read the identity file {path} ({error.strerror})", fix="correct identity_file"
            ) from error
        except asyncssh.KeyEncryptionError as error:
            raise self._error(f"identity file {path} cannot be decrypted: {error}") from error
        except asyncssh.KeyImportError as error:
            if not _has_passphrase(error):
                raise self._error(
                    f"identity file {path} holds no private key that can be used ({error})",
                    fix="name a private key in the format of OpenSSH or PEM",
                ) from error
            self.keys += _same_key(path, held)
            if not self.keys:
                raise self._error(
                    f"identity file {path} has a passphrase, and no agent holds the key",
                    fix=f"load it into the agent: ssh-add {path}",
                ) from error

    def _load_candidate(self, path: Path, held: Sequence[asyncssh.SSHKeyPair]) -> None:
        """Take one of ssh's usual keys where it is there and fit; else keep in mind why not."""
        try:
            refusal = _unsafe(path)
            if refusal is not None:
                self._passed_over.append(f"{path} {refusal[0]}")
                return
            self.keys.append(self._read(path))
        except FileNotFoundError:
            return
        except OSError as error:
            self._passed_over.append(f"{path}: {error.strerror}")
        except (asyncssh.KeyImportError, asyncssh.KeyEncryptionError) as error:
            self.keys += _same_key(path, held)
            self._passed_over.append(f"{path} has a passphrase" if _has_passphrase(error) else f"{path}: {error}")

    def _read(self, path: Path) -> Any:  # noqa: ANN401  # a key, or a key with its certificate, as asyncssh takes them
        key = asyncssh.read_private_key(str(path))
        for certificate_path in (*self._target.certificates, Path(f"{path}-cert.pub")):
            if certificate_path.exists():
                try:
                    certificate = asyncssh.read_certificate(str(certificate_path))
                except asyncssh.KeyImportError as error:  # as ssh does: the key may do without
                    self._passed_over.append(f"{certificate_path}: {error}")
                    continue
                if certificate.key.public_data == key.public_data:
                    return key, certificate
        return key

    def _error(self, message: str, *, fix: str | None = None) -> HostError:
        return HostError(self._target.host, Stage.AUTHENTICATE, message, fix=fix)


def _unsafe(path: Path) -> tuple[str, str] | None:
    """Say what is wrong with a key file, and the way out. Raises OSError where it cannot be looked at."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        kind = "a directory" if stat.S_ISDIR(status.st_mode) else "no regular file"
        return f"is {kind}", "name the private key itself"
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        return f"can be read by others (mode {mode:04o})", f"chmod 600 {quote(str(path))}"
    return None


def _has_passphrase(error: Exception) -> bool:
    return "passphrase" in str(error).lower()


def _same_key(path: Path, held: Sequence[asyncssh.SSHKeyPair]) -> list[asyncssh.SSHKeyPair]:
    """Return the agent's key pairs for a private key that cannot be decrypted here."""
    for file in (Path(f"{path}.pub"), path):  # OpenSSH's own format tells the public half without the passphrase
        try:
            public = asyncssh.read_public_key(str(file)).public_data
        except (OSError, asyncssh.KeyImportError):
            continue
        return [pair for pair in held if pair.public_data == public]
    return []
