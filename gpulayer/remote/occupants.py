"""Who is on the devices of a run besides the run itself, before it starts, while it goes on and when it has ended.

The driver is asked in a child: one in trouble hangs whoever calls it. What cannot be told is None, never "nobody".
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time

from gpulayer.gpu.discovery_occupants import LOOK_LIMIT_S, PROBE, occupancies
from gpulayer.remote import processes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from typing import Any

    # By device: {"processes": [...] or None, "free": bytes or None} (`Occupancy`); a missing device was not asked.
    Sight = dict[str, dict[str, Any]]

RUN_ID = "GPULAYER_RUN_ID"
"""What a process of a run has in its environment, unless it has cleared that."""

_FIRST, _SELDOM = 1.0, 60.0  # seconds after which a run's devices are looked at, then twice as long each time
_SLACK = 256 << 20  # bytes by which a driver's own use of an idle device goes up and down
_MAX_FOREIGN = 16  # of these a record holds


def look(devices: Collection[str] | None = None) -> Sight:
    """Ask the driver; the answer is of `devices`, or of all."""
    return {
        device: {"processes": found.processes, "free": found.free}
        for device, found in occupancies().items()
        if devices is None or device in devices
    }


def others(sight: Sight, own: Callable[[int], bool] = lambda _: False) -> list[dict[str, Any]] | None:
    """Return the living processes on the devices that are not `own`; None where not a single device tells.

    A probe's, of whichever controller, is nobody's: it tries a device for a moment, and may be under way right now.
    """
    if not any(found["processes"] is not None for found in sight.values()):
        return None
    listed = [process for found in sight.values() for process in found["processes"] or ()]
    return [process for process in listed if _is_there(process["pid"]) and not own(process["pid"])]


def _is_there(pid: int) -> bool:
    return processes.start_of(pid) is not None and processes.variable(pid, PROBE) is None


def words(found: list[dict[str, Any]]) -> str:
    """Return processes for people: `process 4242 (ollama, user bob, 5.2 GiB) and 2 more`."""
    process = found[0]
    memory = process["memory_bytes"]
    about = [process["name"], process["user"] and f"user {process['user']}", memory and f"{memory / 2**30:.1f} GiB"]
    text = f"process {process['pid']} ({', '.join(word for word in about if word)})"
    return text if len(found) == 1 else f"{text} and {len(found) - 1} more"


class Look:
    """A look that goes on in a child while its parent does other things. Its end raises SIGCHLD."""

    def __init__(self, devices: Collection[str]) -> None:
        """Begin."""
        self._pipe, end = os.pipe()
        os.set_blocking(self._pipe, False)
        self._data = b""
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()
                signal.set_wakeup_fd(-1)
                processes.shed({0, 1, 2, end})  # no lease and no lock: it may outlive us
                os.write(end, json.dumps(look(devices)).encode("ascii"))
            finally:
                os._exit(0)
        os.close(end)

    def result(self) -> Sight | None:
        """Return the answer, {} where there is none to be had, or None while it is being waited for."""
        with contextlib.suppress(BlockingIOError):
            while True:
                data = os.read(self._pipe, 1 << 16)
                if not data:
                    break
                self._data += data
            os.close(self._pipe)
            try:
                sight: Sight = json.loads(self._data)
            except ValueError:
                return {}
            return sight
        return None

    def wait(self, seconds: float) -> Sight:
        """Wait for the answer; a look that takes longer is given up, and has told nothing."""
        give_up = time.monotonic() + seconds
        while True:
            sight = self.result()
            if sight is not None:
                return sight
            left = give_up - time.monotonic()
            if left <= 0 or not select.select([self._pipe], [], [], left)[0]:
                self.abandon()
                return {}

    def abandon(self) -> None:
        """End a look that nobody waits for any more."""
        os.close(self._pipe)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class Watch:
    """Looks at a run's devices now and then, and once more when it has ended."""

    def __init__(self, devices: list[str], run: str, before: Sight) -> None:
        """`before` is what was seen when the run was about to start; where that is nothing, nothing is asked later."""
        self._devices = devices
        self._run = run
        self._before = before
        self._look: Look | None = None
        self._pause = _FIRST
        self._next = time.monotonic() + _FIRST
        self.foreign: list[dict[str, Any]] | None = None if others(before) is None else []
        """The processes of others that were seen since the run began; None as long as that cannot be told."""

    @property
    def aside(self) -> set[int]:
        """The child that looks: it is no part of the run."""
        return set() if self._look is None else {self._look.pid}

    def step(self, members: Callable[[], Collection[int]]) -> bool:
        """Begin a look that is due, or take its answer; say whether `foreign` has changed."""
        if not self._before:
            return False
        if self._look is None:
            if time.monotonic() >= self._next:
                self._look = Look(self._devices)
            return False
        sight = self._look.result()
        if sight is None:
            return False
        self._look = None
        self._next, self._pause = time.monotonic() + self._pause, min(2 * self._pause, _SELDOM)
        own = members()
        found = others(sight, lambda pid: pid in own or processes.variable(pid, RUN_ID) == self._run)
        if found is None:
            return False
        known = {(process["device"], process["pid"]): process for process in self.foreign or ()}
        new = [process for process in found if (process["device"], process["pid"]) not in known]
        changed = bool(new) or self.foreign is None
        self.foreign = [*known.values(), *new][-_MAX_FOREIGN:]
        return changed

    def end(self, patience: float) -> tuple[dict[str, str], list[dict[str, Any]]]:
        """Say whether each device is `free` of the run, `held` or `unknown`, and which processes are on them.

        A dead process's memory is back when the driver has taken it down: waits for that up to `patience` seconds.
        """
        if not self._before:
            return dict.fromkeys(self._devices, "unknown"), []
        if self._look is not None:
            self._look.wait(LOOK_LIMIT_S)
            self._look = None
        give_up = time.monotonic() + patience
        while True:
            sight = Look(self._devices).wait(LOOK_LIMIT_S)
            verdicts = {device: self._verdict(device, sight) for device in self._devices}
            if "held" not in verdicts.values() or time.monotonic() >= give_up:
                return verdicts, others(sight) or []
            time.sleep(0.1)

    def _verdict(self, device: str, sight: Sight) -> str:
        if device not in sight:
            return "unknown"
        found = others({device: sight[device]})
        known = {process["pid"] for process in self.foreign or ()}
        if found and any(process["pid"] not in known for process in found):
            return "held"
        before, free = self._before.get(device, {}).get("free"), sight[device]["free"]
        if before is None or free is None:
            return "unknown" if found is None else "free"
        taken = sum(process["memory_bytes"] or 0 for process in found or ())
        return "free" if free + taken + _SLACK >= before else "held"
