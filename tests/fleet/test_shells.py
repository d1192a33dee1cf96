"""The agent starts through every login shell, and what start files do to it is told in words."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulayer.errors import Stage
from gpulayer.fleet import process, shipment
from gpulayer.fleet.session import Session
from gpulayer.fleet.transport import ConnectOptions
from gpulayer.spec.inventory import Host, Inventory, TransportKind
from tests.fleet.conftest import Failure, Greet, run
from tests.host.test_launch import NASTY
from tests.sshd import SHELLS, Farm, SshdHost

NOISE = "echo hello; printf 'no newline, \\033[31m colour'"


def noisy(farm: Farm, sshd_host: Callable[..., SshdHost], shell: str) -> SshdHost:
    """A host whose login shell says something before it does what it is told."""
    name = f"noisy-{shell}"
    return farm.hosts.get(name) or sshd_host(name, shell=shell, rc="" if shell == "dash" else NOISE)


@pytest.mark.parametrize("transport", [TransportKind.SSH, TransportKind.OPENSSH])
@pytest.mark.parametrize("shell", SHELLS)
async def test_the_agent_starts_in_every_login_shell_through_noise(
    farm: Farm, sshd_host: Callable[..., SshdHost], greet: Greet, shell: str, transport: TransportKind
) -> None:
    known = noisy(farm, sshd_host, shell)
    host = dataclasses.replace(known.host, transport=transport)
    hello = await greet(host)
    assert hello["home"] == str(known.home)


# All that has bytes, none a NUL: text, bytes that are no UTF-8, what shells obey, and what looks like an option.
WORDS = st.one_of(
    st.binary(max_size=12).map(lambda raw: os.fsdecode(raw.replace(b"\0", b""))),
    st.lists(st.sampled_from([*"'\"\\ $!*?~#;&|<>(){}[]^%=-\n\t\r", "$(id)", "`id`", "\x1b", "é"]), max_size=8).map(
        "".join
    ),
)


@pytest.mark.parametrize("shell", SHELLS)
@given(words=st.lists(WORDS, max_size=40))
@settings(max_examples=2)
async def test_words_and_variables_arrive_byte_for_byte_through_every_login_shell(
    farm: Farm, sshd_host: Callable[..., SshdHost], connect_options: ConnectOptions, shell: str, words: list[str]
) -> None:
    words = [*NASTY, *words]
    known = noisy(farm, sshd_host, shell)
    show = "import os, sys; out = [*map(os.fsencode, sys.argv[1:]), os.environb[b'X']]; "
    show += "sys.stdout.buffer.write(b'\\0'.join(out))"
    async with await Session.open(known.host, Inventory(hosts={}), connect_options) as session:
        state, output = await run(session, ["python", "-c", show, *words], env={"X": words[0]})
    assert state["code"] == 0
    assert output.split(b"\0") == [os.fsencode(word) for word in (*words, words[0])]


async def test_the_agent_starts_on_this_machine(greet: Greet) -> None:
    assert await greet(Host(name="here", transport=TransportKind.LOCAL))


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
    *, sshd_host: Callable[..., SshdHost], failure: Failure, case: str, shell: str, rc: str, words: str
) -> None:
    host = sshd_host(case, shell=shell, rc=rc).host
    # fish reads its whole input before it says anything, so there the limit is reached first.
    error = await failure(host, start_timeout=1 if "fish" in rc else 30)
    assert error.stage is Stage.SHELL
    assert words in error.reason


async def test_a_start_file_that_hangs_ends_at_the_limit(sshd_host: Callable[..., SshdHost], failure: Failure) -> None:
    host = sshd_host("hangs", rc="echo waiting for godot; sleep 100").host
    error = await failure(host, start_timeout=0.5)
    assert error.stage is Stage.SHELL
    assert "waiting for godot" in error.reason


async def test_a_forced_command_is_shown(sshd_host: Callable[..., SshdHost], failure: Failure) -> None:
    host = sshd_host("forced", config=["ForceCommand echo This account is for backups only."]).host
    error = await failure(host)
    assert error.stage is Stage.SHELL
    assert "for backups only" in error.reason


async def test_what_start_files_set_leads_no_python_astray(
    sshd_host: Callable[..., SshdHost], greet: Greet, tmp_path: Path
) -> None:
    for name in ("json", "hashlib", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w').close()\n")
    host = sshd_host(
        "broken-path", rc=f"export PATH=/nowhere PYTHONPATH={tmp_path} ENV={tmp_path}/rc PYTHONHOME=/no"
    ).host
    assert await greet(host)
    assert not (tmp_path / "mark").exists()


def interpreter(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


async def test_the_inventorys_python_comes_first_and_may_begin_with_a_tilde(
    sshd_host: Callable[..., SshdHost], greet: Greet
) -> None:
    known = sshd_host("own-python", python="~/my python")
    interpreter(known.home / "my python", f'touch "$HOME/used"; exec {sys.executable} "$@"')
    assert await greet(known.host)
    assert (known.home / "used").exists()


async def test_an_old_or_missing_interpreter_is_passed_over(
    sshd_host: Callable[..., SshdHost], greet: Greet, tmp_path: Path
) -> None:
    known = sshd_host("old-python", python=interpreter(tmp_path / "old", "exit 98"))
    assert await greet(known.host)
    assert await greet(dataclasses.replace(known.host, python="/no/such/python"))
    assert await greet(dataclasses.replace(known.host, python=interpreter(tmp_path / "python2", "exit 2")))


@pytest.mark.parametrize(
    ("scripts", "words"),
    [
        ({"python3": "exit 98"}, "only older: "),
        ({}, "no python3 is found"),
        ({"python3": "touch opened-the-installer", "xcode-select": "exit 2"}, "placeholder"),
    ],
)
async def test_without_a_usable_python_the_stage_is_python(
    failure: Failure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scripts: dict[str, str], words: str
) -> None:
    # The system's own folders are hidden by running the very command with another folder in their place.
    command = shipment.REMOTE_COMMAND
    for place in ("/opt/homebrew/bin", "/usr/local/bin", "/usr/bin"):
        command = command.replace(place, str(tmp_path))
    monkeypatch.setattr(process, "REMOTE_COMMAND", command)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name, script in scripts.items():
        interpreter(tmp_path / name, script)
    error = await failure(Host(name="bare", transport=TransportKind.LOCAL))
    assert error.stage is Stage.PYTHON
    assert words in error.reason
    assert not (tmp_path / "opened-the-installer").exists()
