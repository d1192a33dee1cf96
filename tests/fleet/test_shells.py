"""The agent starts through every login shell, and what start files do to it is told in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from gpulayer.errors import HostError, Stage
from gpulayer.fleet.session import Session
from gpulayer.fleet.transport import ConnectOptions
from gpulayer.spec.inventory import Host, Inventory, TransportKind
from tests.sshd import SHELLS, Farm, SshdHost

NOISE = "echo hello; printf 'no newline, \\033[31m colour'"


async def failure(host: Host, options: ConnectOptions) -> HostError:
    with pytest.raises(HostError) as caught:
        await Session.open(host, Inventory(hosts={host.name: host}), options)
    return caught.value


async def greet(host: Host, options: ConnectOptions) -> dict[str, object]:
    async with await Session.open(host, Inventory(hosts={host.name: host}), options) as session:
        assert "now" in (await session.request("ping")).header
        return dict(session.hello)


@pytest.mark.parametrize("transport", [TransportKind.SSH, TransportKind.OPENSSH])
@pytest.mark.parametrize("shell", SHELLS)
async def test_the_agent_starts_in_every_login_shell_through_noise(
    farm: Farm,
    sshd_host: Callable[..., SshdHost],
    connect_options: ConnectOptions,
    shell: str,
    transport: TransportKind,
) -> None:
    name = f"noisy-{shell}"
    known = farm.hosts.get(name) or sshd_host(name, shell=shell, rc="" if shell == "dash" else NOISE)
    host = dataclasses.replace(known.host, transport=transport)
    hello = await greet(host, connect_options)
    assert hello["home"] == str(known.home)


async def test_the_agent_starts_on_this_machine(connect_options: ConnectOptions) -> None:
    assert await greet(Host(name="here", transport=TransportKind.LOCAL), connect_options)


@pytest.mark.parametrize(
    ("case", "shell", "rc", "words"),
    [
        ("reads-a-line", "bash", "read x", "standard input"),
        ("reads-all", "bash", "head -c 100 >/dev/null", "standard input"),
        ("exec-fish", "bash", "exec fish", "another shell"),
        ("exec-tcsh", "zsh", "exec tcsh", "another shell"),
        ("exec-bash", "tcsh", "exec bash", "another shell"),
        ("exec-dash", "fish", "exec dash", "another shell"),
        ("exits", "bash", "echo go away; exit 0", "go away"),
        ("floods", "bash", "head -c 10000000 /dev/zero | tr '\\0' x", "no frame within"),
    ],
)
async def test_what_start_files_break_is_named(
    *, sshd_host: Callable[..., SshdHost], connect_options: ConnectOptions, case: str, shell: str, rc: str, words: str
) -> None:
    host = sshd_host(case, shell=shell, rc=rc).host
    # fish reads its whole input before it says anything, so there the limit is reached first.
    error = await failure(host, dataclasses.replace(connect_options, start_timeout=1 if "fish" in rc else 30))
    assert (error.stage, error.host) == (Stage.SHELL, case)
    assert words in error.reason
    assert error.fix


async def test_a_start_file_that_hangs_ends_at_the_limit(
    sshd_host: Callable[..., SshdHost], connect_options: ConnectOptions
) -> None:
    host = sshd_host("hangs", rc="echo waiting for godot; sleep 100").host
    error = await failure(host, dataclasses.replace(connect_options, start_timeout=0.5))
    assert error.stage is Stage.SHELL
    assert "waiting for godot" in error.reason


async def test_a_forced_command_is_shown(sshd_host: Callable[..., SshdHost], connect_options: ConnectOptions) -> None:
    host = sshd_host("forced", config=["ForceCommand echo This account is for backups only."]).host
    error = await failure(host, connect_options)
    assert error.stage is Stage.SHELL
    assert "for backups only" in error.reason


async def test_a_broken_path_still_finds_python(
    sshd_host: Callable[..., SshdHost], connect_options: ConnectOptions
) -> None:
    host = sshd_host("broken-path", rc="export PATH=/nowhere").host
    assert await greet(host, connect_options)
