"""The `openssh` transport: the system's ssh as a child process, for what asyncssh cannot do (ProxyCommand, GSSAPI …).

It reads its own configuration; what must not depend on it is put on the command line, which comes first.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path

from gpulayer.errors import HostError, Stage
from gpulayer.fleet.process import login_environment, start_process
from gpulayer.fleet.shipment import REMOTE_COMMAND
from gpulayer.fleet.sshconfig import check_name, config_words, home_path
from gpulayer.fleet.transport import Channel, ConnectOptions, DroppedError, Receiver
from gpulayer.spec.inventory import Host

DEEPEST_JUMP = 8

# What ssh says on standard error when it fails itself, with the stage that it means and the way out. First match wins.
_COMPLAINTS: tuple[tuple[str, Stage, str], ...] = (
    (r"Could not resolve hostname|Bad configuration option|terminating, \d+ bad", Stage.RESOLVE, "correct `address`"),
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED|is marked as revoked|Host key for .* has changed",
        Stage.HOST_KEY,
        "somebody may stand between you and the host; if it was set up anew, remove the old key: ssh-keygen -R",
    ),
    (
        r"Host key verification failed|No \S+ host key is known",
        Stage.HOST_KEY,
        "compare the fingerprint with the host's own, then repeat with --accept-new-host-key",
    ),
    (r"Permissions \d+ for .* are too open", Stage.AUTHENTICATE, "chmod 600 that key, or name another: ssh ignores it"),
    (
        r"Permission denied|Too many authentication failures",
        Stage.AUTHENTICATE,
        "add your public key to ~/.ssh/authorized_keys there, correct `user` and `identity_file`, or ssh-add the key",
    ),
    (r"no matching .* found", Stage.HOST_KEY, "update the host's SSH server"),
    (r"invalid format|Protocol major versions differ", Stage.CONNECT, "correct `address` and `port`"),
)
_NO_WAY = re.compile(r"refused|timed out|No route|unreachable|Connection|connect|Exceeded MaxStartups")
_DROPPED = re.compile(r"kex_exchange_identification|Exceeded MaxStartups")
_SSH_FAILED = 255
_MESSAGES = 16 * 1024


def _key(host: Host, named: str) -> Path:
    """Return where the inventory's key is; HostError where no regular file lies there: ssh would wait at a pipe."""
    path = home_path(named)
    if path.exists() and not path.is_file():
        kind = "a directory" if path.is_dir() else "no regular file"
        what = f"identity file {path} is {kind}"
        raise HostError(host.name, Stage.AUTHENTICATE, what, fix="name the private key itself")
    return path


class _NewKeys:
    """Reads from ssh's messages which new key it took, and passes everything on."""

    def __init__(self, receiver: Receiver, accept_new: Callable[[str, str], None]) -> None:
        self._accept_new = accept_new
        self._said = b""
        self.data_received = receiver.data_received
        self.ended = receiver.ended
        self._pass_on = receiver.stderr_received

    def stderr_received(self, data: bytes) -> None:
        self._said = (self._said + data)[:_MESSAGES]
        fingerprint = re.search(rb"Server host key: \S+ (\S+)", self._said)
        added = re.search(rb"Permanently added '([^']+)' \((\S+)\)", self._said)
        if fingerprint and added:
            name, kind, digest = (word.decode(errors="replace") for word in (added[1], added[2], fingerprint[1]))
            self._accept_new(name, f"{kind} {digest}")
            self._said = b" " * _MESSAGES  # one connection takes one new key
        self._pass_on(data)


class OpenSshTransport:
    """Reaches one host with the system's ssh."""

    def __init__(self, host: Host, hosts: Mapping[str, Host], options: ConnectOptions) -> None:
        """`hosts` are the inventory's, of which jump hosts may be taken."""
        self._host = host
        self._hosts = hosts
        self._options = options

    async def start(self, receiver: Receiver) -> Channel:
        """Start ssh. Its own failures show when it ends, by `explain`. Raises HostError where it cannot be started."""
        words = [*self._words(self._host, 0), "-T", "--", self._host.target, REMOTE_COMMAND]
        if self._options.accept_new is not None:
            receiver = _NewKeys(receiver, self._options.accept_new)
        try:
            return await start_process(words, login_environment("SSH_AUTH_SOCK", "KRB5CCNAME"), receiver)
        except OSError as error:
            raise HostError(
                self._host.name,
                Stage.CONNECT,
                f"cannot start ssh ({error.strerror})",
                fix="install the OpenSSH client, or use `transport: ssh`",
            ) from error

    def explain(self, status: int | None, stderr: bytes) -> HostError | None:
        """Return what ssh said when it failed itself (status 255)."""
        if status != _SSH_FAILED:
            return None
        # What the server made ssh say may be anything. Its lines are looked at one by one: a pattern that may begin
        # anywhere takes seconds for a long one.
        lines = [line.strip(" @").rstrip(".")[:300] for line in stderr.decode(errors="replace").splitlines()]
        lines = [line for line in lines if line and not line.startswith("debug1:")]
        said = lines[-1] if lines else "it says nothing"
        for pattern, stage, fix in _COMPLAINTS:
            for line in lines:
                if re.search(pattern, line):
                    return HostError(self._host.name, stage, line, fix=fix)
        # Where a jump host failed the connection through it is dropped, too: what was said first is the cause.
        first = next(filter(_NO_WAY.search, lines), "")
        if _DROPPED.search(first):
            return DroppedError(self._host.name, Stage.CONNECT, f"the server hung up at once ({said})", fix="try again")
        if first:
            return HostError(self._host.name, Stage.CONNECT, first, fix="is the machine on and in reach?")
        return HostError(self._host.name, Stage.CONNECT, f"ssh failed: {said}", fix=f"try: ssh {self._host.target}")

    def _words(self, host: Host, depth: int) -> list[str]:
        """Return ssh's command line up to the address, the way through jump hosts included."""
        if depth > DEEPEST_JUMP:
            raise HostError(self._host.name, Stage.RESOLVE, "its jump hosts lead in a circle", fix="correct `jump`")
        check_name(host.name, host.target, host.user)
        options = self._options
        settings = {
            "BatchMode": "yes",
            "StrictHostKeyChecking": "accept-new" if options.accept_new else "yes",
            "UserKnownHostsFile": " ".join(f'"{path}"' for path in options.known_hosts),
            "GlobalKnownHostsFile": "/dev/null",  # the system's is among ours
            "VerifyHostKeyDNS": "no",
            "NoHostAuthenticationForLocalhost": "no",
            "UpdateHostKeys": "no",
            "ControlPath": "none",  # a connection that was made before may have been made without these
            "ControlMaster": "no",
            "ForwardAgent": "no",
            "GSSAPIDelegateCredentials": "no",
            "Tunnel": "no",
            "SetEnv": "GPULAYER_SSH=1",  # the first one counts: it keeps what the configuration sets from being sent
            "ForwardX11": "no",
            "ClearAllForwardings": "yes",
            "PermitLocalCommand": "no",
            "RemoteCommand": "none",
            "RequestTTY": "no",
            "EscapeChar": "none",
            "ConnectTimeout": str(int(options.connect_timeout)),
            "ServerAliveInterval": "15",
            "ServerAliveCountMax": "3",
            "LogLevel": "DEBUG1" if options.accept_new else "ERROR",  # the one that shows the fingerprint of a new key
        }
        words = ["ssh"]
        if options.ssh_config.exists():
            words += config_words(options)
        words += [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
        words += ["-p", str(host.port)] if host.port else []
        words += ["-l", host.user] if host.user else []
        # ssh itself takes `~` for the account's home, whatever $HOME says.
        words += ["-i", str(_key(host, host.identity_file)), "-o", "IdentitiesOnly=yes"] if host.identity_file else []
        if host.jump:
            jump = self._hosts.get(host.jump) or Host(name=host.jump)
            way = [word.replace("%", "%%") for word in self._words(jump, depth + 1)]
            words += ["-o", f"ProxyCommand={shlex.join([*way, '-W', '[%h]:%p', '--', jump.target])}"]
        return words
