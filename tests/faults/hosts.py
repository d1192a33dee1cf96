"""Hosts that can lose their power: sshd and all that it started vanish at once, and another boot follows.

Where the tests run as root such a host is a pid and mount namespace of its own, whose init is killed, and a new boot id
is seen after it. Elsewhere all its processes are killed one by one within the same boot.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.sshd import SshdHost, descendants, with_us

NAMESPACES = os.geteuid() == 0
LIMIT = 30.0  # seconds that anything here may take

# Children that it adopts are reaped by the kernel, since SIGCHLD stays ignored through exec.
_INIT = """\
mount --bind "$0" /proc/sys/kernel/random/boot_id && trap '' CHLD && echo up && exec sleep infinity
"""


def wait_until(holds: Callable[[], object], limit: float = LIMIT) -> None:
    """Wait until something holds."""
    give_up = time.monotonic() + limit
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.01)


async def until(holds: Callable[[], object], limit: float = LIMIT) -> None:
    """Wait until something holds, while controllers and proxies of this process go on."""
    async with asyncio.timeout(limit):
        while not holds():  # noqa: ASYNC110  # what is waited for happens in other processes
            await asyncio.sleep(0.01)


@dataclass(kw_only=True)
class PoweredHost(SshdHost):
    """A host with a power switch. `boot` counts its boots."""

    boot: int = 0
    init: subprocess.Popen[bytes] | None = field(default=None)

    @property
    def lost_reason(self) -> str:
        """Return why a run is lost that was cut short by `power_off`: only a namespace is another boot."""
        return "reboot" if NAMESPACES else "supervisor_died"

    def start(self) -> None:
        """Start sshd; the power is switched on where it is off."""
        if NAMESPACES and self.init is None:
            self._power_on()
        super().start()

    def command(self, sshd: list[str]) -> list[str]:
        """Return the words that start sshd inside the host."""
        if self.init is None:
            return sshd
        inside = descendants([self.init.pid])[0]
        return ["nsenter", "--target", str(inside), "--pid", "--mount", "--wdns=/", "--", *sshd]

    def sessions(self) -> list[int]:
        """Return the pids of sshd's connections that are open, without the listener, before which nsenter stands."""
        return super().sessions()[0 if self.init is None else 1 :]

    def stop(self) -> None:
        """End the listener and every open connection. Detached processes live on."""
        listener = [] if self.init is None else super().sessions()[:1]
        super().stop()
        for pid in listener:
            send(pid)

    def power_off(self) -> None:
        """Let every process of this host vanish."""
        if self.init is None:
            self.stop()
            while left := self.inside():
                for pid in left:
                    send(pid)
            return
        inside = descendants([self.init.pid])
        for pid in inside[:1]:
            send(pid)
        self.init.wait()
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
        wait_until(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in inside))
        self.init = None

    def restart(self) -> None:
        """Restart sshd: every link is cut, what is detached lives on."""
        self.stop()
        self.start()

    def power_cycle(self) -> None:
        """Let everything vanish and boot again."""
        self.power_off()
        self.start()

    def kill(self, process: list[int], number: int = signal.SIGKILL) -> None:
        """Send a signal to a process that a record of this host names as [pid, start]."""
        pid, start = process
        for outer in _all_pids() if self.init is not None else [pid]:
            if _inner_pid(outer) == pid and start_of(outer) == start and self._is_inside(outer):
                send(outer, number)

    def environment(self, variables: Mapping[str, str]) -> None:
        """Let sshd give these variables to what it starts from its next start on, beside HOME and its like."""
        lines = self.config.read_text().splitlines()
        kept = [word for word in shlex.split(lines[-1])[1:] if not word.startswith("GL_FAIL=")]
        words = [*kept, *(f"{name}={value}" for name, value in variables.items())]
        lines[-1] = "SetEnv " + " ".join(f'"{word}"' for word in words)
        self.config.write_text("\n".join([*lines, ""]))

    def inside(self) -> list[int]:
        """Return the living processes that sshd's sessions have started: agents, supervisors, jobs."""
        mark = f"HOME={self.home}".encode()
        return [pid for pid in _all_pids() if mark in _environment(pid)]

    def _is_inside(self, pid: int) -> bool:
        return self.init is None or pid in descendants([self.init.pid])

    def _power_on(self) -> None:
        self.boot += 1
        boot_id = self.log.with_name(f"boot-{self.boot}")
        boot_id.write_text(f"{uuid.uuid4()}\n")
        self.init = subprocess.Popen(
            [
                *with_us(),
                "unshare",
                "--pid",
                "--fork",
                "--mount-proc",
                "--mount",
                "--kill-child",
                "sh",
                "-c",
                _INIT,
                str(boot_id),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # unshare complains of its own end
            start_new_session=True,
        )
        assert self.init.stdout is not None
        with self.init.stdout as said:
            assert said.readline() == b"up\n"


def is_stopped(pid: int) -> bool:
    """Say whether a process was stopped by a signal."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208  # called very often


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _inner_pid(pid: int) -> int | None:
    """Return what a process is called in its own pid namespace."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    return next((int(line.split()[-1]) for line in status.splitlines() if line.startswith("NSpid:")), None)


def start_of(pid: int) -> int | None:
    """Return when a process was started, in the kernel's own unit; None where there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return None


def send(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a process of a host, by its pid here."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
