"""The way to a host: names, ports, logins, jump hosts, aliases; each failure with its stage."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpulayer.errors import Stage
from gpulayer.fleet import session as session_module
from gpulayer.fleet.openssh import OpenSshTransport, _NewKeys
from gpulayer.fleet.session import Fleet, Session
from gpulayer.fleet.sshconfig import resolve
from gpulayer.fleet.transport import ConnectOptions
from gpulayer.spec.inventory import Host, Inventory, TransportKind
from tests.faults.hosts import until
from tests.fleet.conftest import Failure, Greet
from tests.sshd import ADDRESS, USER, Farm, SshdHost, keygen, known_hosts_line

BOTH = pytest.mark.parametrize("transport", [TransportKind.SSH, TransportKind.OPENSSH])


@contextlib.asynccontextmanager
async def server(answer: bytes | None, *, hang_up: bool = True, count: list[int] | None = None) -> AsyncIterator[int]:
    """Listen on a port, say something to whoever connects, and hang up, or keep silent."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if count is not None:
            count.append(1)
        with contextlib.suppress(ConnectionError):
            if answer is not None:
                writer.write(answer)
                await writer.drain()
            if not hang_up:
                await reader.read()
                await asyncio.wait_for(reader.read(), 30)
            writer.close()
            await writer.wait_closed()

    listener = await asyncio.start_server(serve, ADDRESS, 0)
    async with listener:
        yield listener.sockets[0].getsockname()[1]


@BOTH
async def test_an_unknown_name_fails_to_resolve(failure: Failure, farm: Farm, transport: TransportKind) -> None:
    host = Host(name="lost", address="no-such-host.invalid", transport=transport, identity_file=str(farm.identity))
    error = await failure(host)
    assert error.stage is Stage.RESOLVE
    assert "no-such-host.invalid" in error.reason


@pytest.mark.parametrize(("platform", "is_hinted"), [("darwin", True), ("linux", False)])
async def test_no_route_on_a_mac_may_be_its_local_network_privacy(
    platform: str, is_hinted: bool, failure: Failure, farm: Farm, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unreached(*_: object, **__: object) -> None:
        raise OSError(errno.EHOSTUNREACH, "Connect call failed")

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", unreached)
    monkeypatch.setattr("gpulayer.fleet.sshstreams.sys", SimpleNamespace(platform=platform))
    error = await failure(Host(name="beside", address=ADDRESS, port=9, identity_file=str(farm.identity)))
    assert error.stage is Stage.CONNECT
    assert "No route to host" in error.reason
    assert "in reach" in str(error.fix)
    assert ("Local Network" in str(error.fix)) is is_hinted


@BOTH
async def test_a_closed_port_fails_to_connect(failure: Failure, farm: Farm, transport: TransportKind) -> None:
    with socket.socket() as free:
        free.bind((ADDRESS, 0))
        port = free.getsockname()[1]
    host = Host(name="off", address=ADDRESS, port=port, transport=transport, identity_file=str(farm.identity))
    error = await failure(host)
    assert error.stage is Stage.CONNECT
    assert "refused" in error.reason


@BOTH
async def test_a_silent_port_ends_at_the_limit(failure: Failure, farm: Farm, transport: TransportKind) -> None:
    async with server(None, hang_up=False) as port:
        host = Host(name="mute", address=ADDRESS, port=port, transport=transport, identity_file=str(farm.identity))
        error = await failure(host, login_timeout=0.5, connect_timeout=1, start_timeout=1)
    assert error.stage is Stage.CONNECT


@BOTH
async def test_another_service_is_no_ssh_server(failure: Failure, farm: Farm, transport: TransportKind) -> None:
    async with server(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 300, hang_up=False) as port:
        host = Host(name="web", address=ADDRESS, port=port, transport=transport, identity_file=str(farm.identity))
        error = await failure(host, connect_timeout=1, login_timeout=2, start_timeout=1)
    assert error.stage is Stage.CONNECT


@BOTH
async def test_a_server_that_hangs_up_is_tried_again_a_few_times(
    failure: Failure, farm: Farm, monkeypatch: pytest.MonkeyPatch, transport: TransportKind
) -> None:
    monkeypatch.setattr("gpulayer.fleet.session.jittered", lambda _: 0.0)
    for answer in (b"", b"Exceeded MaxStartups\r\n"):
        count: list[int] = []
        async with server(answer, count=count) as port:
            host = Host(name="full", address=ADDRESS, port=port, identity_file=str(farm.identity), transport=transport)
            error = await failure(host)
        assert error.stage is Stage.CONNECT
        assert "hung up" in error.reason
        assert len(count) == 9


async def test_a_server_that_punishes_is_not_tried_again(failure: Failure, farm: Farm) -> None:
    count: list[int] = []
    async with server(b"Not allowed at this time\r\n", count=count) as port:
        error = await failure(Host(name="cross", address=ADDRESS, port=port, identity_file=str(farm.identity)))
    assert "refuses this machine for a while" in error.reason
    assert len(count) == 1


@BOTH
async def test_a_refused_login_is_never_tried_again(
    sshd_host: Callable[..., SshdHost], failure: Failure, tmp_path: Path, transport: TransportKind
) -> None:
    known = sshd_host(f"locked-{transport}")
    stranger = keygen(tmp_path / "stranger")
    error = await failure(dataclasses.replace(known.host, identity_file=str(stranger), transport=transport))
    assert error.stage is Stage.AUTHENTICATE
    assert len(re.findall(r"Failed publickey|Connection closed by authenticating", known.journal())) <= 2
    assert len(re.findall(r"Connection from", known.journal())) == 1
    gate = dataclasses.replace(known.host, name="gate", identity_file=str(stranger))
    error = await failure(dataclasses.replace(known.host, jump="gate", transport=transport), gate)
    assert error.stage is Stage.AUTHENTICATE
    assert len(re.findall(r"Connection from", known.journal())) == 2


@pytest.mark.parametrize("case", ["open", "folder", "missing", "passphrase", "no-key"])
async def test_an_identity_file_that_cannot_be_used_is_one_clear_line(
    plain_host: SshdHost, failure: Failure, tmp_path: Path, case: str
) -> None:
    path = tmp_path / "key"
    words = {
        "open": "can be read by others (mode 0644)",
        "folder": "is a directory",
        "missing": "No such file",
        "passphrase": "has a passphrase, and no agent holds the key",
        "no-key": "holds no private key",
    }
    if case == "folder":
        path.mkdir()
    elif case == "no-key":
        path.write_text("hello")
        path.chmod(0o600)
    elif case != "missing":
        keygen(path, "-N", "secret" if case == "passphrase" else "")
    if case == "open":
        path.chmod(0o644)
    error = await failure(dataclasses.replace(plain_host.host, identity_file=str(path)))
    assert error.stage is Stage.AUTHENTICATE
    assert words[case] in error.reason
    assert "\n" not in error.reason


@pytest.mark.parametrize(
    "content",
    ["-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n", "nonsense\n"],
    ids=["x509", "nonsense"],
)
async def test_a_certificate_that_cannot_be_used_leaves_the_key(
    plain_host: SshdHost, greet: Greet, farm: Farm, tmp_path: Path, content: str
) -> None:
    key = tmp_path / "key"
    key.write_bytes(farm.identity.read_bytes())
    key.chmod(0o600)
    key.with_name("key-cert.pub").write_text(content)
    assert await greet(dataclasses.replace(plain_host.host, identity_file=str(key)))


@pytest.mark.timeout(30)  # ssh waits at a pipe until it is ended
@pytest.mark.parametrize(
    ("case", "words", "fix"),
    [
        ("open", "Permissions 0644 for '{}' are too open", "chmod 600"),
        ("folder", "identity file {} is a directory", "name the private key itself"),
        ("pipe", "identity file {} is no regular file", "name the private key itself"),
        ("passphrase", "Permission denied", "ssh-add"),
    ],
)
async def test_what_ssh_itself_says_of_a_key_that_it_cannot_use_is_told_with_its_fix(
    *, plain_host: SshdHost, farm: Farm, failure: Failure, tmp_path: Path, case: str, words: str, fix: str
) -> None:
    path = tmp_path / "key"
    if case == "folder":
        path.mkdir()
    elif case == "pipe":
        os.mkfifo(path)
    elif case == "open":
        path.write_bytes(farm.identity.read_bytes())
        path.chmod(0o644)
    else:
        keygen(path, "-N", "secret")
    target = dataclasses.replace(plain_host.host, transport=TransportKind.OPENSSH, identity_file=str(path))
    error = await failure(target)
    assert error.stage is Stage.AUTHENTICATE
    assert words.format(path) in error.reason
    assert fix in str(error.fix)


@pytest.fixture
def ssh_agent(farm: Farm, tmp_path: Path) -> Iterator[str]:
    """A real ssh agent that holds the farm's key; gives its socket."""
    path = str(farm.root / f"agent-{tmp_path.name}")
    process = subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.DEVNULL)
    add = ["ssh-add", "-q", str(farm.identity)]
    while subprocess.run(add, env={**os.environ, "SSH_AUTH_SOCK": path}, check=False, capture_output=True).returncode:
        assert process.poll() is None
    yield path
    process.terminate()
    process.wait()


async def test_a_key_with_a_passphrase_is_used_through_the_agent(
    plain_host: SshdHost, farm: Farm, greet: Greet, ssh_agent: str, tmp_path: Path
) -> None:
    locked = tmp_path / "locked"
    locked.write_bytes(farm.identity.read_bytes())
    locked.chmod(0o600)
    lock = ["ssh-keygen", "-q", "-p", "-P", "", "-N", "secret", "-f", str(locked)]
    await asyncio.to_thread(subprocess.run, lock, check=True)
    assert await greet(dataclasses.replace(plain_host.host, identity_file=str(locked)), agent_socket=ssh_agent)
    assert await greet(dataclasses.replace(plain_host.host, identity_file=None), agent_socket=ssh_agent)


async def test_neither_environment_nor_agent_goes_along(
    *,
    sshd_host: Callable[..., SshdHost],
    farm: Farm,
    greet: Greet,
    ssh_agent: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The configuration asks for both and the server would take both, as plain ssh shows; our transports give none."""
    monkeypatch.setenv("AWS_SECRET", "s3cr3t-value")
    monkeypatch.setenv("SSH_AUTH_SOCK", ssh_agent)
    config = tmp_path / "config"
    config.write_text("Host *\n  SendEnv *\n  SetEnv MINE=s3cr3t-value\n  ForwardAgent yes\n")
    known = sshd_host("curious", config=["AcceptEnv *", "AllowAgentForwarding yes"], rc='env > "$HOME/env"')
    target = ["-o", f"UserKnownHostsFile={farm.known_hosts}", "-i", str(farm.identity), "-p", str(known.port)]
    plain = await asyncio.create_subprocess_exec(
        "ssh", "-F", str(config), *target, f"{USER}@{ADDRESS}", "env", stdout=asyncio.subprocess.PIPE
    )
    given = (await plain.communicate())[0].decode().splitlines()
    assert {"AWS_SECRET=s3cr3t-value", "MINE=s3cr3t-value"} < set(given)
    assert any(line.startswith("SSH_AUTH_SOCK=/tmp/ssh-") for line in given)
    for transport in (TransportKind.SSH, TransportKind.OPENSSH):
        host = dataclasses.replace(known.host, transport=transport)
        assert await greet(host, ssh_config=config, agent_socket=ssh_agent)
        given = (known.home / "env").read_text().splitlines()
        (known.home / "env").unlink()
        assert any(line.startswith("SSHD_FARM=") for line in given)
        assert not any("s3cr3t" in line for line in given)
        # SendEnv adds up, so of what ssh itself is given it sends the names that are asked for: of our agent the path.
        assert not any(line.startswith("SSH_AUTH_SOCK=") and line != f"SSH_AUTH_SOCK={ssh_agent}" for line in given)
        assert transport is TransportKind.OPENSSH or f"SSH_AUTH_SOCK={ssh_agent}" not in given


async def test_the_configuration_weakens_none_of_openssh_s_settings(
    plain_host: SshdHost, connect_options: ConnectOptions, tmp_path: Path
) -> None:
    weak = {
        "StrictHostKeyChecking": "no", "UserKnownHostsFile": "none", "GlobalKnownHostsFile": "/tmp/any",
        "VerifyHostKeyDNS": "yes", "NoHostAuthenticationForLocalhost": "yes", "ControlMaster": "auto",
        "ControlPath": "/tmp/master", "ForwardAgent": "yes", "ForwardX11": "yes", "GSSAPIDelegateCredentials": "yes",
        "Tunnel": "yes", "PermitLocalCommand": "yes", "UpdateHostKeys": "yes", "SetEnv": "MINE=s3cr3t",
        "RemoteCommand": "id", "RequestTTY": "force", "BatchMode": "no", "LocalForward": "8080 localhost:80",
    }  # fmt: skip
    config = tmp_path / "config"
    config.write_text("Host *\n" + "".join(f"  {key} {value}\n" for key, value in weak.items()))

    async def settings(*words: str) -> set[str]:
        ssh = await asyncio.create_subprocess_exec("ssh", "-G", *words, "--", ADDRESS, stdout=asyncio.subprocess.PIPE)
        return set((await ssh.communicate())[0].decode().lower().splitlines())

    host = dataclasses.replace(plain_host.host, transport=TransportKind.OPENSSH)
    options = dataclasses.replace(connect_options, ssh_config=config)
    ours = await settings(*OpenSshTransport(host, {}, options)._words(host, 0)[1:])
    theirs = await settings("-F", str(config))
    kept = {key for key in weak if any(line.startswith(f"{key.lower()} ") for line in ours & theirs)}
    assert kept == set()
    assert {"stricthostkeychecking true", "forwardagent no", "controlmaster false", "batchmode yes"} < ours
    assert f"userknownhostsfile {str(connect_options.known_hosts[0]).lower()}" in ours


@pytest.fixture
def hanging(tmp_path: Path) -> tuple[Path, Path]:
    """A configuration whose `Match exec` hangs, and the file in which it leaves its pid."""
    config, pid = tmp_path / "config", tmp_path / "pid"
    config.write_text(f'Match exec "echo $$ > {pid}; exec sleep 60"\n  User nobody\n')
    return config, pid


async def test_a_match_exec_that_hangs_is_told_and_ended(
    failure: Failure, hanging: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpulayer.fleet.sshconfig._PATIENCE", 0.5)
    config, pid = hanging
    begun = time.monotonic()
    error = await failure(Host(name="slow", address=ADDRESS, port=9), ssh_config=config)
    assert time.monotonic() - begun < 20
    assert (error.stage, error.fix) == (Stage.RESOLVE, f"look for a `Match exec` in {config} that hangs")
    await until(lambda: not Path(f"/proc/{pid.read_text().strip()}/exe").exists())


async def test_what_a_match_exec_leaves_in_the_background_is_not_waited_for(
    connect_options: ConnectOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpulayer.fleet.sshconfig._PATIENCE", 5.0)
    config, pid = tmp_path / "config", tmp_path / "pid"
    config.write_text(f'Match exec "sleep 60 & echo $! > {pid}"\n  Port 9\n')
    try:
        host = Host(name="tunnel", address=ADDRESS)
        target = await resolve(host, {}, dataclasses.replace(connect_options, ssh_config=config))
        assert target.port == 9
    finally:
        os.kill(int(pid.read_text()), signal.SIGKILL)


async def test_a_match_exec_that_hangs_in_ssh_itself_delays_no_end(
    failure: Failure, hanging: tuple[Path, Path]
) -> None:
    config, pid = hanging
    limits = {"connect_timeout": 1.0, "login_timeout": 0.0, "start_timeout": 0.5}
    begun = time.monotonic()
    host = Host(name="slow", address=ADDRESS, port=9, transport=TransportKind.OPENSSH)
    error = await failure(host, ssh_config=config, **limits)
    assert time.monotonic() - begun < 20
    assert error.stage is Stage.SHELL
    os.kill(int(pid.read_text()), signal.SIGKILL)


async def test_what_a_server_makes_ssh_say_costs_no_time_and_shows_as_it_is(connect_options: ConnectOptions) -> None:
    transport = OpenSshTransport(Host(name="far", transport=TransportKind.OPENSSH), {}, connect_options)
    begun = time.process_time()
    for said in (b"x" * 16_384, b"Connection\xff\xfe" * 1000, b"\n" * 16_384, b"a\x1b]0;pwn\x07" * 1000):
        error = transport.explain(255, said)
        assert error is not None
        assert error.stage is Stage.CONNECT
        assert len(error.reason) < 400
    assert time.process_time() - begun < 0.5
    told: list[tuple[str, str]] = []
    receiver = _NewKeys(session_module.Session(transport._host, None, transport), lambda *new: told.append(new))
    receiver.stderr_received(b"Server host key: ssh-ed25519 SHA256:\xff\nPermanently added 'a\xff' (\xff) to\n")
    assert told == [("a\ufffd", "\ufffd SHA256:\ufffd")]


@BOTH
@pytest.mark.parametrize("address", ["-oProxyCommand=touch pwned", "host name", "a;b", ""])
async def test_an_address_that_is_none_reaches_no_program(
    failure: Failure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, address: str, transport: TransportKind
) -> None:
    monkeypatch.chdir(tmp_path)
    host = Host(name="bad" if address else "-bad", address=address or None, transport=transport)
    assert (await failure(host)).stage is Stage.RESOLVE
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("user", ["root;id", "..", "-l"])
async def test_a_user_that_is_none_is_refused(failure: Failure, plain_host: SshdHost, user: str) -> None:
    assert "is no user name" in (await failure(dataclasses.replace(plain_host.host, user=user))).reason


@BOTH
async def test_jump_hosts_of_the_inventory_are_gone_through(
    sshd_host: Callable[..., SshdHost], greet: Greet, transport: TransportKind
) -> None:
    first, second = sshd_host(f"gate-{transport}"), sshd_host(f"door-{transport}")
    inner = sshd_host(f"room-{transport}").host
    door = dataclasses.replace(second.host, jump=first.host.name)
    target = dataclasses.replace(inner, jump=door.name, transport=transport)
    assert await greet(target, door, first.host)
    assert "Starting session: forced-command" not in first.journal()
    for hop in (first, second):
        assert "Accepted publickey" in hop.journal()


@BOTH
async def test_jump_hosts_in_a_circle_are_refused(
    plain_host: SshdHost, failure: Failure, transport: TransportKind
) -> None:
    one = dataclasses.replace(plain_host.host, name="one", jump="two", transport=transport)
    two = dataclasses.replace(plain_host.host, name="two", jump="one", transport=transport)
    error = await failure(one, two)
    assert error.stage is Stage.RESOLVE
    assert "circle" in error.reason


async def test_a_jump_host_that_fails_is_named(plain_host: SshdHost, failure: Failure, tmp_path: Path) -> None:
    stranger = str(keygen(tmp_path / "stranger"))
    gate = dataclasses.replace(plain_host.host, name="gate", identity_file=stranger)
    error = await failure(dataclasses.replace(plain_host.host, jump="gate"), gate)
    assert error.stage is Stage.AUTHENTICATE
    assert "jump host gate" in error.reason
    closed = dataclasses.replace(plain_host.host, name="closed", jump="open", port=1)
    error = await failure(closed, dataclasses.replace(plain_host.host, name="open"))
    assert error.stage is Stage.CONNECT
    assert "its jump host cannot reach" in error.reason


async def test_hosts_behind_one_gate_share_its_connection(
    sshd_host: Callable[..., SshdHost], plain_host: SshdHost, connect_options: ConnectOptions
) -> None:
    gate = sshd_host("shared-gate")
    behind = [dataclasses.replace(plain_host.host, name=f"b{i}", jump="shared-gate") for i in range(4)]
    inventory = Inventory(hosts={host.name: host for host in (*behind, gate.host)})
    async with Fleet(inventory, connect_options) as fleet:
        sessions = await fleet.connect(host.name for host in behind)
        assert all(isinstance(session, Session) for session in sessions.values())
    assert gate.journal().count("Accepted publickey") == 1


async def test_an_alias_means_what_openssh_means(
    *,
    sshd_host: Callable[..., SshdHost],
    plain_host: SshdHost,
    farm: Farm,
    greet: Greet,
    failure: Failure,
    tmp_path: Path,
) -> None:
    gate = sshd_host("alias-gate")
    known_hosts = tmp_path / "known_hosts"
    key_of_alias = known_hosts_line(plain_host.port, Path(f"{plain_host.host_key}.pub"))
    known_hosts.write_text(
        key_of_alias.replace(ADDRESS, "kept-as") + known_hosts_line(gate.port, Path(f"{gate.host_key}.pub"))
    )
    (tmp_path / "more").write_text(
        f"Host box\n  HostName {ADDRESS}\n  Port {plain_host.port}\n  HostKeyAlias kept-as\n  ProxyJump gate\n"
        f"Host gate\n  HostName {ADDRESS}\n  Port {gate.port}\n"
        f"Host proxied\n  ProxyCommand touch {tmp_path}/pwned\n"
    )
    config = tmp_path / "config"
    config.write_text(
        f'Include {tmp_path}/more\nMatch host box exec "touch {tmp_path}/exec"\n  ConnectTimeout 9\n'
        f"Host *\n  ServerAliveInterval 15s\n  User {USER}\n  IdentityFile {farm.identity}\n  Unknown no\n".replace(
            "  Unknown no\n", ""
        )
    )
    settings = {"ssh_config": config, "known_hosts": (known_hosts,)}
    assert (await greet(Host(name="box"), **settings))["home"] == str(plain_host.home)
    assert "Accepted publickey" in gate.journal()
    error = await failure(Host(name="proxied"), **settings)
    assert error.stage is Stage.RESOLVE
    assert "ProxyCommand" in error.reason
    assert not (tmp_path / "pwned").exists()


async def test_forty_logins_at_once_stay_within_the_servers_limits(
    sshd_host: Callable[..., SshdHost], connect_options: ConnectOptions
) -> None:
    known = sshd_host("crowded", config=["MaxStartups 8:100:8"])
    crowd = [dataclasses.replace(known.host, name=f"c{i}") for i in range(40)]
    async with Fleet(Inventory(hosts={host.name: host for host in crowd}), connect_options) as fleet:
        sessions = await fleet.connect(host.name for host in crowd)
        assert not [session for session in sessions.values() if not isinstance(session, Session)]
    assert "drop connection" not in known.journal()
