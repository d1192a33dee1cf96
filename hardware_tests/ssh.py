"""The machine under test as a host of an inventory, reached over SSH: its own sshd, else asyncssh's server."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import asyncssh

from gpulayer.fleet.transport import ConnectOptions
from gpulayer.spec.inventory import Host, Inventory
from tests.sshd import ADDRESS, new_farm

NAME = "under-test"
ROOT = Path(__file__).resolve().parents[1]

# A login has hardly any variables. These lead to the driver where it lies apart, and the others are the machine's
# owner's word on what collectives may do.
_PASSED = ("PATH", "LD_LIBRARY_PATH", "NCCL_", "NVSHMEM_", "TORCH_SYMM_MEM_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """The inventory of the one host, how to connect to it, and what serves it."""

    inventory: Inventory
    options: ConnectOptions
    server: str


def which_sshd() -> str | None:
    """Return the path of the machine's sshd."""
    return shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


@contextmanager
def ssh_host(folder: Path) -> Iterator[Reached]:
    """Serve this machine for as long as the block lasts. Nothing of it is changed: all files lie in `folder`.

    The jobs' interpreter is the one that runs now; the home is the user's own, where frameworks may be installed.
    """
    with _sshd() if which_sshd() else _asyncssh_server(folder) as (host, known_hosts, server):
        here = replace(
            host, python=sys.executable, state_dir=str(folder / "state"), lease_dir=str(folder / "leases")
        )  # fmt: skip
        options = ConnectOptions(
            known_hosts=(known_hosts,), ssh_config=folder / "no-config", agent_socket=None, local_python=None
        )
        yield Reached(inventory=Inventory(hosts={NAME: here}), options=options, server=server)


@contextmanager
def _sshd() -> Iterator[tuple[Host, Path, str]]:
    with new_farm() as farm:
        yield farm.host(NAME, environment=_environment()).host, farm.known_hosts, "OpenSSH's sshd"


@contextmanager
def _asyncssh_server(folder: Path) -> Iterator[tuple[Host, Path, str]]:
    for name in ("host_key", "identity"):
        key = asyncssh.generate_private_key("ssh-ed25519")
        (folder / name).touch(mode=0o600)
        key.write_private_key(str(folder / name))
        key.write_public_key(str(folder / f"{name}.pub"))
    command = [sys.executable, "-m", "hardware_tests.ssh_server", str(folder)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=ROOT, env=_environment(), text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        port = process.stdout.readline()
        assert port, "the server did not start; its error is above"
        host = Host(
            name=NAME,
            address=ADDRESS,
            port=int(port),
            user=pwd.getpwuid(os.geteuid()).pw_name,
            identity_file=str(folder / "identity"),
            host_key=asyncssh.read_public_key(str(folder / "host_key.pub")).get_fingerprint(),
        )
        yield host, folder / "known_hosts", f"asyncssh {asyncssh.__version__}'s server"
        process.stdin.close()


def _environment() -> dict[str, str]:
    passed = {name: value for name, value in os.environ.items() if name.startswith(_PASSED)}
    return {**passed, "HOME": str(Path.home())}
