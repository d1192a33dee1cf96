"""The hosts that the tests stand on are what they claim to be."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sshd import SHELLS, Farm, SshdHost

# Each shell says its name in its own way only: the syntax of one is an error in the others.
WHO = {
    "bash": "echo $BASH_VERSION | grep -c '[.]'",
    "zsh": "echo $ZSH_VERSION | grep -c '[.]'",
    "fish": "echo $FISH_VERSION | grep -c '[.]'; set -l x 1",
    "tcsh": "echo $tcsh | grep -c '[.]'",
    "dash": 'test -z "$BASH_VERSION$ZSH_VERSION" && readlink /proc/$$/exe | grep -c dash',
}


def ssh(farm: Farm, host: SshdHost, command: str) -> subprocess.CompletedProcess[str]:
    trust = [
        "-F",
        "none",
        "-o",
        f"UserKnownHostsFile={farm.known_hosts}",
        "-o",
        "BatchMode=yes",
        "-o",
        "KexAlgorithms=curve25519-sha256",
    ]
    target = ["-i", str(farm.identity), "-p", str(host.port), f"{host.host.user}@{host.host.address}"]
    return subprocess.run(["ssh", *trust, *target, command], capture_output=True, text=True, check=False, timeout=20)


@pytest.mark.parametrize("shell", SHELLS)
def test_a_host_runs_commands_in_its_login_shell_and_home(
    farm: Farm, sshd_host: Callable[..., SshdHost], shell: str
) -> None:
    rc = "" if shell == "dash" else "echo noise"
    host = sshd_host(f"shell-{shell}", shell=shell, rc=rc)
    assert ssh(farm, host, WHO[shell]).stdout.split() == ["noise"] * bool(rc) + ["1"]
    assert ssh(farm, host, "echo $HOME").stdout.split()[-1] == str(host.home)


def test_what_a_host_leaves_behind_is_found_by_its_mark(farm: Farm, plain_host: SshdHost) -> None:
    answer = ssh(farm, plain_host, "setsid sleep 60 >/dev/null 2>&1 </dev/null & echo started")
    assert answer.stdout == "started\n"
    assert list(farm.marked())


WAITS = """
import asyncio
from pathlib import Path
import pytest
from tests.conftest import farm, sshd_host

@pytest.mark.timeout({limit}, func_only=True)
async def test_that_waits_for_ever(sshd_host):
    Path("{pid}").write_text(str(sshd_host("waits").process.pid))
    await asyncio.Event().wait()
"""


@pytest.mark.parametrize("end", ["time limit", "kill"])
def test_a_test_that_waits_for_ever_leaves_no_server(tmp_path: Path, end: str) -> None:
    root, pid = Path(__file__).parents[2], tmp_path / "pid"
    program = tmp_path / "test_waits.py"
    program.write_text(WAITS.format(limit=1 if end == "time limit" else 60, pid=pid))
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(root / "pyproject.toml")]
    with subprocess.Popen([*words, str(program)], cwd=root, stdout=subprocess.PIPE, text=True) as tests:
        if end == "kill":
            while not (pid.exists() and pid.read_text()):
                assert tests.poll() is None
                time.sleep(0.01)
            tests.kill()
        said, _ = tests.communicate(timeout=60)
    if end == "time limit":
        assert tests.returncode == 1
        assert "Timeout (>1.0s) from pytest-timeout" in said
    give_up = time.monotonic() + 20
    while Path("/proc", pid.read_text()).exists():  # a signal takes a moment
        assert time.monotonic() < give_up
        time.sleep(0.01)
