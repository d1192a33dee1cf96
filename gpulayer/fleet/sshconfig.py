"""Where an inventory's host really is: its own fields first, then what ~/.ssh/config says, then the defaults.

OpenSSH's own resolver (`ssh -G`) is asked, so that aliases, Include and Match mean what OpenSSH means. `Match exec`
runs there as it would for ssh itself; we run nothing ourselves. Only the keys that are named here are taken over.
"""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import glob
import os
import pwd
import re
import signal
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpulayer.errors import HostError, Stage, UsageError
from gpulayer.fleet.process import login_environment
from gpulayer.fleet.transport import ConnectOptions
from gpulayer.spec import files
from gpulayer.spec.inventory import Host, TransportKind

# A name or address that no program takes for an option and no shell for anything else.
_ADDRESS = re.compile(r"[A-Za-z0-9_\[:][A-Za-z0-9_.:%\[\]-]{0,254}")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+\\-]{0,254}\$?")
_DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")
DEFAULT_PORT = 22
_SETTING = re.compile(r"\s*(\w+)(?:\s*=\s*|\s+)(.*)")
_PATIENCE = 20.0
_SHOWN = 2000  # bytes of what ssh says against a configuration
_LARGEST = 2**20  # bytes of a configuration file
_DEEPEST_INCLUDE = 16  # OpenSSH's own limit (readconf.c, READCONF_MAX_DEPTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """All that is needed to connect to one server. `key_name` is the name under which known_hosts keeps its key.

    `identity` is the one key of the inventory, which must work; `identities` are candidates that are used where they
    exist. `jumps` are reached one through the other, in this order.
    """

    host: str
    address: str
    port: int
    user: str
    key_name: str
    pin: str | None = None
    identity: Path | None = None
    identities: tuple[Path, ...] = ()
    certificates: tuple[Path, ...] = ()
    only_identities: bool = False
    agent_socket: str | None = None
    jumps: tuple[Host, ...] = ()


def config_words(options: ConnectOptions) -> list[str]:
    """Return the options with which ssh reads the file that was asked for, and the system's too if it is the user's."""
    own = Path(pwd.getpwuid(os.getuid()).pw_dir) / ".ssh" / "config"
    return [] if options.ssh_config == own else ["-F", str(options.ssh_config)]


def is_address(word: str) -> bool:
    """Tell whether a word can stand for a host on a command line."""
    return _ADDRESS.fullmatch(word) is not None


def aliases(config: Path) -> list[str]:
    """Return the concrete names of the `Host` lines of the user's configuration and of what it includes, in order.

    Patterns (`*`, `?`, `!`) are no hosts. UsageError where a file that is there cannot be read.
    """
    return list(dict.fromkeys(_aliases(config, config.parent, 0))) if config.exists() else []


def _aliases(config: Path, folder: Path, depth: int) -> Iterator[str]:
    """Yield the names of one file; relative names in it are beside the user's own file, wherever it is itself."""
    try:
        text = "" if config.samefile(os.devnull) else files.read(config, _LARGEST).decode(errors="surrogateescape")
    except (files.UnusableFileError, OSError) as error:
        fix = "mend it, or write inventory.yaml by hand"
        raise UsageError(f"{config}: {error}", fix=fix) from error
    for line in text.splitlines():
        keyword, rest = match.groups() if (match := _SETTING.match(line)) else ("", "")
        words = [quoted or plain for quoted, plain in re.findall(r'"([^"]*)"|([^\s"]+)', rest)]
        if keyword.lower() == "host":
            yield from (word for word in words if not set(word) & set("*?!"))
        elif keyword.lower() == "include" and depth < _DEEPEST_INCLUDE:
            for word in words:
                for path in sorted(glob.glob(str(folder / home_path(word)))):  # noqa: PTH207  # may be absolute
                    yield from _aliases(Path(path), folder, depth + 1)


def check_name(host: str, address: str, user: str | None) -> None:
    """Raise HostError where an address or user could be taken for an option or for more than a name."""
    if not is_address(address):
        raise HostError(host, Stage.RESOLVE, f"{address!r} is no host name, address or alias", fix="correct `address`")
    if user is not None and not _USER.fullmatch(user):
        raise HostError(host, Stage.RESOLVE, f"{user!r} is no user name", fix="correct `user`")


async def resolve(host: Host, hosts: Mapping[str, Host], options: ConnectOptions) -> Target:
    """Return where `host` is and how to get there. Raises HostError at stage `resolve`."""
    check_name(host.name, host.target, host.user)
    config: dict[str, list[str]] = {}
    if await asyncio.to_thread(options.ssh_config.exists):
        config = await _ask_ssh(host, options)

    def one(key: str) -> str | None:
        value = config.get(key, ["none"])[0]
        return None if value.lower() == "none" else value

    if (command := one("proxycommand")) is not None:
        raise HostError(
            host.name,
            Stage.RESOLVE,
            f"the ssh configuration reaches {host.target} through a ProxyCommand ({command[:80]}), which is not run",
            fix="use `jump`, ProxyJump, or `transport: openssh` for this host",
        )
    address = one("hostname") or host.target
    port = host.port or int(one("port") or DEFAULT_PORT)
    user = host.user or one("user") or getpass.getuser()
    check_name(host.name, address, user)
    tokens = {"%%": "%", "%d": str(Path.home()), "%h": address, "%n": host.target, "%p": str(port), "%r": user}
    tokens["%u"] = getpass.getuser()

    def paths(key: str) -> tuple[Path, ...]:
        words = [word for word in config.get(key, []) if word.lower() != "none"]
        return tuple(home_path(_expand(word, tokens)) for word in words)

    if host.jump:
        jumps = [_inventory_jump(host, hosts, host.jump)]
    else:
        jumps = [_config_jump(host, word) for word in (one("proxyjump") or "").split(",") if word]
    return Target(
        host=host.name,
        address=address,
        port=port,
        user=user,
        key_name=one("hostkeyalias") or address,
        pin=host.host_key,
        identity=home_path(host.identity_file) if host.identity_file else None,
        identities=paths("identityfile") or tuple(Path.home() / ".ssh" / name for name in _DEFAULT_KEYS),
        certificates=paths("certificatefile"),
        only_identities=one("identitiesonly") == "yes",
        agent_socket=_agent_socket(config, tokens, options),
        jumps=tuple(jumps),
    )


def _inventory_jump(host: Host, hosts: Mapping[str, Host], name: str) -> Host:
    """Return the host that `jump` names: one of the inventory, else an alias."""
    jump = hosts.get(name) or Host(name=name)
    if jump.transport is TransportKind.LOCAL:
        raise HostError(
            host.name, Stage.RESOLVE, f"its jump host {name} is not reached with ssh", fix="name a host with ssh"
        )
    return jump


def _config_jump(host: Host, word: str) -> Host:
    """Read one hop of ProxyJump: [user@]host[:port] or the same as a URL."""
    user, _, rest = word.strip().removeprefix("ssh://").rpartition("@")
    match = re.fullmatch(r"(\[[^\]]+\]|[^:]+)(?::([0-9]{1,5}))?", rest)
    if match is None:
        raise HostError(host.name, Stage.RESOLVE, f"{word!r} is no jump host", fix="write [user@]host[:port]")
    return Host(name=match[1].strip("[]"), user=user or None, port=int(match[2]) if match[2] else None)


def _agent_socket(config: dict[str, list[str]], tokens: dict[str, str], options: ConnectOptions) -> str | None:
    value = config.get("identityagent", ["SSH_AUTH_SOCK"])[0]
    if value == "SSH_AUTH_SOCK":
        return options.agent_socket
    if value.lower() == "none":
        return None
    if value.startswith("$"):
        return os.environ.get(value[1:].strip("{}"))
    return str(home_path(_expand(value, tokens)))


def home_path(word: str) -> Path:
    """Return a path of the inventory or of ssh, whose `~` is $HOME. What names an unknown user stays as it is."""
    return Path(os.path.expanduser(word))  # noqa: PTH111  # Path's own raises there


def _expand(word: str, tokens: dict[str, str]) -> str:
    return re.sub(r"%.", lambda match: tokens.get(match[0], match[0]), word)


async def _ask_ssh(host: Host, options: ConnectOptions) -> dict[str, list[str]]:
    """Return what `ssh -G` says of a host, each key with all its values."""
    words = ["ssh", "-G", *config_words(options)]
    words += ["-l", host.user] if host.user else []
    words += ["-p", str(host.port)] if host.port else []
    # What a `Match exec` leaves in the background has ssh's standard error, and would keep a pipe from ending.
    with tempfile.TemporaryFile() as errors:
        try:
            process = await asyncio.create_subprocess_exec(
                *words,
                "--",
                host.target,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env=login_environment("LANG", "SSH_AUTH_SOCK"),
                start_new_session=True,  # so that what a `Match exec` started ends with it
            )
        except OSError as error:
            raise HostError(
                host.name,
                Stage.RESOLVE,
                f"{options.ssh_config} exists, but ssh, which reads it, cannot be started ({error.strerror})",
                fix="install the OpenSSH client",
            ) from error
        output = await _said(process, host, options)
        errors.seek(0)
        text = errors.read(_SHOWN).decode(errors="replace").strip()
    if process.returncode:
        raise HostError(
            host.name, Stage.RESOLVE, f"`ssh -G {host.target}` failed: {text[:500]}", fix=f"repair {options.ssh_config}"
        )
    config: dict[str, list[str]] = {}
    for line in output.decode(errors="replace").splitlines():
        key, _, value = line.partition(" ")
        config.setdefault(key, []).append(value.strip())
    return config


async def _said(process: asyncio.subprocess.Process, host: Host, options: ConnectOptions) -> bytes:
    """Return what ssh has said, once it has ended; end it and what it started where it does not."""
    try:
        async with asyncio.timeout(_PATIENCE):
            return (await process.communicate())[0]
    except TimeoutError:
        raise HostError(
            host.name,
            Stage.RESOLVE,
            f"`ssh -G {host.target}` did not end within {_PATIENCE:.0f} s",
            fix=f"look for a `Match exec` in {options.ssh_config} that hangs",
        ) from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
