"""Host keys: known, unknown, changed, revoked, pinned; and the one way to take a new one."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulayer.errors import Stage
from gpulayer.fleet import hostkeys
from gpulayer.fleet.session import Fleet, Session
from gpulayer.fleet.transport import ConnectOptions
from gpulayer.spec.inventory import Inventory, TransportKind
from tests.fleet.conftest import Failure, Greet
from tests.sshd import Farm, SshdHost, keygen, known_hosts_line

BOTH = pytest.mark.parametrize("transport", [TransportKind.SSH, TransportKind.OPENSSH])


@pytest.fixture(scope="module")
def host(sshd_host: Callable[..., SshdHost]) -> SshdHost:
    return sshd_host("keys")


@pytest.fixture
def known_hosts(tmp_path: Path) -> Path:
    return tmp_path / "known_hosts"


@BOTH
async def test_an_unknown_key_is_refused_and_nothing_is_written(
    host: SshdHost, failure: Failure, known_hosts: Path, transport: TransportKind
) -> None:
    error = await failure(dataclasses.replace(host.host, transport=transport), known_hosts=(known_hosts,))
    assert error.stage is Stage.HOST_KEY
    assert not known_hosts.exists()
    if transport is TransportKind.SSH:  # the system's ssh does not show it in batch mode
        assert host.fingerprint in error.reason
    assert "--accept-new-host-key" in str(error.fix)


@BOTH
async def test_a_new_key_is_shown_and_written_once_when_asked(
    host: SshdHost, greet: Greet, known_hosts: Path, transport: TransportKind
) -> None:
    # ssh itself neither minds a missing newline nor writes names that can be read.
    known_hosts.write_text("# no newline" if transport is TransportKind.SSH else "# a newline\n")
    shown: list[tuple[str, str]] = []
    target = dataclasses.replace(host.host, transport=transport)
    for _ in range(2):
        assert await greet(target, known_hosts=(known_hosts,), accept_new=lambda *seen: shown.append(seen))
    ((name, fingerprint),) = shown
    assert name == f"[127.0.0.1]:{host.port}"
    assert host.fingerprint in fingerprint
    (line,) = known_hosts.read_text().splitlines()[1:]
    expected = known_hosts_line(host.port, Path(f"{host.host_key}.pub")).split()
    assert line.split()[1:] == expected[1:]
    if transport is TransportKind.SSH:
        assert line.split()[0] == expected[0]
    assert await greet(target, known_hosts=(known_hosts,))


async def test_a_new_key_that_two_connections_meet_is_shown_once(
    host: SshdHost, connect_options: ConnectOptions, known_hosts: Path
) -> None:
    shown: list[tuple[str, str]] = []
    options = dataclasses.replace(
        connect_options, known_hosts=(known_hosts,), accept_new=lambda *seen: shown.append(seen)
    )
    behind = dataclasses.replace(host.host, name="behind", jump=host.host.name)
    inventory = Inventory(hosts={one.name: one for one in (host.host, behind)})
    async with Fleet(inventory, options) as fleet:
        answers = await fleet.connect(list(inventory.hosts))
    assert all(isinstance(answer, Session) for answer in answers.values())
    assert len(shown) == len(known_hosts.read_text().splitlines()) == 1


@BOTH
async def test_the_home_of_an_identity_file_is_the_controllers(
    host: SshdHost, greet: Greet, monkeypatch: pytest.MonkeyPatch, transport: TransportKind
) -> None:
    assert host.host.identity_file
    identity = Path(host.host.identity_file)
    monkeypatch.setenv("HOME", str(identity.parent))
    assert await greet(dataclasses.replace(host.host, transport=transport, identity_file=f"~/{identity.name}"))


@BOTH
@pytest.mark.parametrize("accept", [False, True])
async def test_a_changed_key_stops_hard_even_when_new_keys_are_accepted(
    host: SshdHost, failure: Failure, known_hosts: Path, transport: TransportKind, *, accept: bool
) -> None:
    known_hosts.write_text(known_hosts_line(host.port, Path(f"{keygen(known_hosts.with_name('other'))}.pub")))
    before = known_hosts.read_bytes()
    shown: list[tuple[str, str]] = []
    error = await failure(
        dataclasses.replace(host.host, transport=transport),
        known_hosts=(known_hosts,),
        accept_new=(lambda *seen: shown.append(seen)) if accept else None,
    )
    assert error.stage is Stage.HOST_KEY
    assert "CHANGED" in error.reason.upper()
    assert known_hosts.read_bytes() == before
    assert not shown


@BOTH
@pytest.mark.parametrize("also_known", [False, True])
async def test_a_revoked_key_is_refused(
    host: SshdHost, failure: Failure, known_hosts: Path, transport: TransportKind, *, also_known: bool
) -> None:
    public = Path(f"{host.host_key}.pub")
    lines = [known_hosts_line(host.port, public, "@revoked")]
    if also_known:
        lines.append(known_hosts_line(host.port, public))
    known_hosts.write_text("".join(lines))
    target = dataclasses.replace(host.host, transport=transport)
    error = await failure(target, known_hosts=(known_hosts,), accept_new=lambda *_: None)
    assert error.stage is Stage.HOST_KEY
    assert "REVOKED" in error.reason.upper()


async def test_a_key_revoked_on_one_port_is_not_trusted_by_the_bare_name(
    host: SshdHost, failure: Failure, known_hosts: Path
) -> None:
    public = Path(f"{host.host_key}.pub")
    bare = known_hosts_line(host.port, public).replace(f"[127.0.0.1]:{host.port}", "127.0.0.1")
    known_hosts.write_text(known_hosts_line(host.port, public, "@revoked") + bare)
    assert "REVOKED" in (await failure(host.host, known_hosts=(known_hosts,))).reason


async def test_a_pin_suffices_and_binds(host: SshdHost, greet: Greet, failure: Failure, known_hosts: Path) -> None:
    assert await greet(dataclasses.replace(host.host, host_key=host.fingerprint), known_hosts=(known_hosts,))
    wrong = dataclasses.replace(host.host, host_key="SHA256:" + "A" * 43)
    error = await failure(wrong)  # although known_hosts knows the key
    assert error.stage is Stage.HOST_KEY
    assert "pinned is SHA256:AAAA" in error.reason
    known_hosts.write_text(known_hosts_line(host.port, Path(f"{host.host_key}.pub"), "@revoked"))
    pinned = dataclasses.replace(host.host, host_key=host.fingerprint)
    assert "REVOKED" in (await failure(pinned, known_hosts=(known_hosts,))).reason


async def test_a_damaged_known_hosts_file_is_named_with_its_line(
    host: SshdHost, failure: Failure, known_hosts: Path
) -> None:
    known_hosts.write_text("# fine\nnonsense\n")
    assert f"{known_hosts}:2:" in (await failure(host.host, known_hosts=(known_hosts,))).reason


@pytest.mark.timeout(20)  # one that waits at a pipe, or reads a device to its end, waits for ever
@pytest.mark.parametrize("what", ["pipe", "device", "folder", "large"])
async def test_what_is_no_known_hosts_file_is_named_and_never_waited_for(
    host: SshdHost, failure: Failure, known_hosts: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    if what == "pipe":
        os.mkfifo(known_hosts)
    elif what == "device":
        known_hosts.symlink_to("/dev/zero")
    elif what == "folder":
        known_hosts.mkdir()
    else:
        monkeypatch.setattr(hostkeys, "MAX_BYTES", 2**20)
        known_hosts.write_bytes(b"#" * (2**20 + 1))
    error = await failure(host.host, known_hosts=(known_hosts,), accept_new=lambda *_: None)
    assert error.stage is Stage.HOST_KEY
    words = {"pipe": "a pipe", "device": "not a regular file", "folder": "a folder", "large": "larger than 1 MiB"}
    assert error.reason.startswith(f"cannot read {known_hosts}: ")
    assert words[what] in error.reason


async def test_a_known_hosts_file_that_is_nowhere_knows_no_key(
    host: SshdHost, failure: Failure, known_hosts: Path
) -> None:
    known_hosts.symlink_to(os.devnull)
    assert "is unknown" in (await failure(host.host, known_hosts=(known_hosts,))).reason


async def test_a_server_that_lost_the_known_kind_of_key_has_changed(
    host: SshdHost, failure: Failure, known_hosts: Path
) -> None:
    other = keygen(known_hosts.with_name("rsa"), "-t", "rsa", "-b", "2048")
    known_hosts.write_text(known_hosts_line(host.port, Path(f"{other}.pub")))
    error = await failure(host.host, known_hosts=(known_hosts,))
    assert "CHANGED" in error.reason


async def test_the_users_configuration_cannot_switch_the_check_off(
    host: SshdHost, failure: Failure, known_hosts: Path, tmp_path: Path
) -> None:
    config, control = tmp_path / "config", tmp_path / "c"
    config.write_text(
        "Host *\n  UserKnownHostsFile none\n  StrictHostKeyChecking no\n  NoHostAuthenticationForLocalhost yes\n"
        f"  ControlPath {control}\n  ControlMaster auto\n"
    )
    words = ["ssh", "-F", str(config), "-p", str(host.port), "-i", str(host.host.identity_file), "-N"]
    # A connection that ssh itself has made under that configuration, and would share with whoever comes.
    master = await asyncio.create_subprocess_exec(*words, str(host.host.address), stderr=asyncio.subprocess.DEVNULL)
    try:
        while not control.exists():
            assert master.returncode is None
            await asyncio.sleep(0.01)
        for transport in (TransportKind.SSH, TransportKind.OPENSSH):
            target = dataclasses.replace(host.host, transport=transport)
            error = await failure(target, known_hosts=(known_hosts,), ssh_config=config)
            assert error.stage is Stage.HOST_KEY
    finally:
        master.terminate()
        await master.wait()
    assert not known_hosts.exists()


@pytest.fixture(scope="module")
def certified(sshd_host: Callable[..., SshdHost], farm: Farm) -> tuple[SshdHost, Path]:
    """A host that shows a certificate for its key and nothing else, and the authority's public key."""
    authority = keygen(farm.root / "authority")
    one = sshd_host("certified")
    certify(authority, one, "127.0.0.1")
    one.stop()
    one.config.write_text(one.config.read_text() + f"HostCertificate {one.host_key}-cert.pub\n")
    one.start()
    return one, Path(f"{authority}.pub")


def certify(authority: Path, one: SshdHost, principal: str, *more: str) -> None:
    words = ["ssh-keygen", "-q", "-s", str(authority), "-I", "host", "-h", "-n", principal, *more]
    subprocess.run([*words, f"{one.host_key}.pub"], check=True)


@BOTH
async def test_a_certificate_of_a_known_authority_suffices_and_must_hold(
    certified: tuple[SshdHost, Path], greet: Greet, failure: Failure, known_hosts: Path, transport: TransportKind
) -> None:
    one, authority = certified
    target = dataclasses.replace(one.host, transport=transport)
    trusted = known_hosts_line(one.port, authority, "@cert-authority")
    known_hosts.write_text(trusted)
    assert await greet(target, known_hosts=(known_hosts,))
    known_hosts.write_text(trusted + known_hosts_line(one.port, authority, "@revoked"))
    assert (await failure(target, known_hosts=(known_hosts,))).stage is Stage.HOST_KEY
    known_hosts.write_text(
        known_hosts_line(one.port, Path(f"{keygen(known_hosts.with_name('x'))}.pub"), "@cert-authority")
    )
    assert (await failure(target, known_hosts=(known_hosts,))).stage is Stage.HOST_KEY
    known_hosts.write_text(trusted)
    for principal, validity in (("other-host", "+1h"), ("127.0.0.1", "20200101:20200102")):
        certify(Path(str(authority).removesuffix(".pub")), one, principal, "-V", validity)
        one.stop()
        one.start()
        error = await failure(target, known_hosts=(known_hosts,), accept_new=None)
        assert error.stage is Stage.HOST_KEY, error
    certify(Path(str(authority).removesuffix(".pub")), one, "127.0.0.1")
    one.stop()
    one.start()
