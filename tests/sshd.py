"""Real OpenSSH servers on loopback: each a host with its own port, host key, home and login shell.

No mock stands between a test and sshd. Nothing of the machine is changed: every host runs as the user who runs the
tests, with a home of its own, and its login shell is the one that sshd starts for the command.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from gpulayer.spec.inventory import Host

ADDRESS = "127.0.0.1"
USER = pwd.getpwuid(os.geteuid()).pw_name
SHELLS = ("bash", "zsh", "fish", "tcsh", "dash")

# What each shell reads when sshd starts it for a command. dash reads nothing then.
RC_FILES = {"bash": ".bashrc", "zsh": ".zshenv", "fish": ".config/fish/config.fish", "tcsh": ".tcshrc"}

_CONFIG = """\
{extra}
Port {port}
ListenAddress {address}
HostKey {host_key}
PidFile none
AuthorizedKeysFile {authorized_keys}
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
PermitRootLogin prohibit-password
PrintMotd no
PrintLastLog no
LogLevel VERBOSE
SetEnv {environment}
"""


def _program(name: str, package: str) -> str:
    path = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if path is None:
        message = (
            f"the tests need `{name}`: install {package} (Debian: apt-get install openssh-server zsh fish tcsh dash)"
        )
        raise RuntimeError(message)
    return path


def keygen(path: Path, *options: str) -> Path:
    """Make an ed25519 key pair without passphrase (unless options say otherwise) and return the private key's path."""
    words = ["-q", "-t", "ed25519", "-C", path.name, "-f", str(path)]
    if "-N" not in options:
        words += ["-N", ""]
    subprocess.run([_program("ssh-keygen", "openssh-client"), *words, *options], check=True)
    return path


def known_hosts_line(port: int, public_key: Path, marker: str = "", address: str = ADDRESS) -> str:
    """Return the line of known_hosts for a key that is served at an address; `marker` is `@revoked` or empty."""
    kind, blob = public_key.read_text().split()[:2]
    return f"{marker} [{address}]:{port} {kind} {blob}".strip() + "\n"


def with_us() -> list[str]:
    """Return the words before a command that Linux ends with this process, should the tests be killed."""
    return ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []


@dataclass(kw_only=True)
class SshdHost:
    """One sshd and the inventory's entry that reaches it. `log` is sshd's own; `journal()` reads it."""

    host: Host
    home: Path
    host_key: Path
    log: Path
    config: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def port(self) -> int:
        assert self.host.port is not None
        return self.host.port

    @property
    def fingerprint(self) -> str:
        """SHA256:… of the host key, as `host_key` of an inventory pins it."""
        answer = subprocess.run(
            ["ssh-keygen", "-lf", f"{self.host_key}.pub"], check=True, capture_output=True, text=True
        )
        return answer.stdout.split()[1]

    @property
    def entry(self) -> dict[str, Any]:
        """This host's mapping in an inventory document."""
        words = ("address", "port", "user", "identity_file", "jump", "host_key", "python", "state_dir", "lease_dir")
        entry = {word: value for word in words if (value := getattr(self.host, word)) is not None}
        return entry | ({"labels": dict(self.host.labels)} if self.host.labels else {})

    def journal(self) -> str:
        """Return what sshd has logged so far."""
        return self.log.read_text(errors="replace")

    def start(self) -> None:
        """Start sshd and wait until it listens. Used again after `stop` it is the same host, on the same port."""
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, parents=True, exist_ok=True)  # its privilege separation folder
        self.log.write_bytes(b"")
        sshd = [_program("sshd", "openssh-server"), "-D", "-f", str(self.config), "-E", str(self.log)]
        self.process = subprocess.Popen(
            [*with_us(), *self.command(sshd)],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        limit = time.monotonic() + 20
        while "Server listening on" not in self.journal():
            if self.process.poll() is not None or time.monotonic() > limit:
                raise RuntimeError(f"sshd did not start: {self.journal()}")
            time.sleep(0.005)

    def command(self, sshd: list[str]) -> list[str]:
        """Return the words that start sshd where this host is."""
        return sshd

    def sessions(self) -> list[int]:
        """Return the pids of sshd's connections that are open (not of what they started)."""
        if self.process is None:
            return []
        return [pid for pid in descendants([self.process.pid]) if _name(pid).startswith("sshd")]

    def cut(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to every open connection's sshd: SIGKILL cuts the links, SIGSTOP makes them silent."""
        for pid in self.sessions():
            _signal(pid, number)

    def stop(self) -> None:
        """End the listener and every open connection. Detached processes live on."""
        if self.process is None:
            return
        open_sessions = self.sessions()
        self.process.kill()
        self.process.wait()
        for pid in open_sessions:
            _signal(pid, signal.SIGKILL)
        self.process = None


@dataclass(kw_only=True)
class Farm:
    """All hosts of a test session and the client's side: one identity, one known_hosts, one home for the controller."""

    root: Path
    mark: str = field(default_factory=lambda: secrets.token_hex(8))
    hosts: dict[str, SshdHost] = field(default_factory=dict)

    @property
    def controller_home(self) -> Path:
        """A HOME for controllers: its `.ssh` holds `known_hosts` and nothing else."""
        return self.root / "controller"

    @property
    def known_hosts(self) -> Path:
        """The file with every host's key."""
        return self.controller_home / ".ssh" / "known_hosts"

    @property
    def identity(self) -> Path:
        """The private key that every host lets in."""
        return self.root / "identity"

    def host(
        self,
        name: str,
        *,
        shell: str = "bash",
        rc: str = "",
        environment: Mapping[str, str] | None = None,
        config: Sequence[str] = (),
        kind: type[SshdHost] | None = None,
        **fields: Any,
    ) -> SshdHost:
        """Start a host. `rc` goes to the shell's start file, `environment` is what sshd gives to commands, `config` are
        lines of sshd_config that come before ours, `kind` is how it is started and stopped, and other fields are those
        of an inventory's host.
        """
        if name in self.hosts:
            raise ValueError(f"the farm has a host {name} already")
        folder = self.root / name
        home = folder / "home"
        home.mkdir(parents=True)
        if rc:
            start_file = home / RC_FILES[shell]
            start_file.parent.mkdir(parents=True, exist_ok=True)
            start_file.write_text(rc)
        host_key = keygen(folder / "host_key")
        program = _program(shell, shell)
        variables = {"HOME": str(home), "SHELL": program, "SSHD_FARM": self.mark, **(environment or {})}
        extra = list(config)
        if not _login_shell_is(shell):
            # sshd starts the user's own shell, which becomes the wanted one, with the very arguments that sshd gives.
            extra.append(f'ForceCommand exec {program} -c "$SSH_ORIGINAL_COMMAND"')
        port = _free_port()
        sshd_config = folder / "sshd_config"
        sshd_config.write_text(
            _CONFIG.format(
                extra="\n".join(extra),
                port=port,
                address=fields.get("address", ADDRESS),
                host_key=host_key,
                authorized_keys=self.root / "identity.pub",
                environment=" ".join(f'"{key}={value}"' for key, value in variables.items()),
            )
        )
        values: dict[str, Any] = {
            "address": ADDRESS,
            "port": port,
            "user": USER,
            "identity_file": str(self.identity),
            "lease_dir": str(folder / "leases"),
            **fields,
        }
        one = (kind or SshdHost)(
            host=Host(name=name, **values), home=home, host_key=host_key, log=folder / "log", config=sshd_config
        )
        one.start()
        self.hosts[name] = one
        with self.known_hosts.open("a") as file:
            file.write(known_hosts_line(port, Path(f"{host_key}.pub"), address=values["address"]))
        return one

    def marked(self) -> Iterator[int]:
        """Yield the pids of all that was started on the farm's hosts and still runs, detached processes too."""
        mark = f"SSHD_FARM={self.mark}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    yield int(folder.name)
            except OSError:
                continue  # it ended, or is another user's

    def close(self) -> None:
        """End every process of the farm and remove its files."""
        listeners = [one.process for one in self.hosts.values() if one.process is not None]
        below = descendants([process.pid for process in listeners])
        for process in listeners:
            process.kill()
            process.wait()
        for pid in below:
            _signal(pid, signal.SIGKILL)
        while left := list(self.marked()):
            for pid in left:
                _signal(pid, signal.SIGKILL)
            time.sleep(0.01)
        shutil.rmtree(self.root, ignore_errors=True)

    def __enter__(self) -> Self:
        self.known_hosts.parent.mkdir(parents=True, mode=0o700)
        self.known_hosts.touch(mode=0o600)
        keygen(self.identity)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def new_farm() -> Farm:
    """Return a farm in a fresh folder. Its path is short: sockets may be made below it."""
    return Farm(root=Path(tempfile.mkdtemp(prefix="sshd-")))


def _login_shell_is(shell: str) -> bool:
    return Path(pwd.getpwuid(os.geteuid()).pw_shell).name == shell


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((ADDRESS, 0))
        port: int = probe.getsockname()[1]
        return port


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def descendants(roots: Sequence[int]) -> list[int]:
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(folder.name))
    found: list[int] = []
    waiting = list(roots)
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found
