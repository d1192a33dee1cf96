"""What GPUlayer does on macOS, with the answers that a Mac would give. docs/mac-checklist.md asks for evidence."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import importlib
import os
import struct
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gpulayer.remote import awake, clock, processes, records
from tests.machines import write_program

F_FULLFSYNC = 51


class Libc:
    """A Mac's C library, as far as it is asked."""

    def __init__(self) -> None:
        self.boots = b"7B1B6C4E-2A0F-4C55-9D0B-0123456789AB"
        self.table: dict[int, bytes] = {}
        self.arguments: dict[int, bytes] = {}

    def sysctlbyname(self, name: bytes, value: Any, size: Any, _new: Any, _length: Any) -> int:
        if name != b"kern.bootsessionuuid":
            return -1
        size._obj.value = len(self.boots) + 1
        if value is not None:
            value.value = self.boots
        return 0

    def proc_pidinfo(self, pid: int, flavor: int, _argument: Any, raw: Any, size: int) -> int:
        if flavor != 3 or pid not in self.table:
            return 0
        raw.raw = self.table[pid]
        return size

    def sysctl(self, name: Any, _count: int, raw: Any, size: Any, _new: Any, _length: Any) -> int:
        found = self.arguments.get(name[2])
        if list(name[:2]) != [1, 49] or found is None:
            return -1
        ctypes.memmove(raw, found, len(found))
        size._obj.value = len(found)
        return 0


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> Libc:
    libc = Libc()
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", lambda _: libc)
    return libc


def test_caffeinate_is_held_for_the_life_of_the_supervisor_and_lets_the_display_sleep(
    mac: Libc, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = tmp_path / "said"
    tool = write_program(tmp_path / "caffeinate", f'#!/bin/sh\necho "$@" > {said}\n')
    monkeypatch.setattr(awake, "CAFFEINATE", str(tool))
    child = awake.keep_awake(4242)
    assert child is not None
    os.waitpid(child, 0)
    assert said.read_text().split() == ["-i", "-s", "-w", "4242"]
    monkeypatch.setattr(awake, "CAFFEINATE", str(tmp_path / "missing"))
    assert awake.keep_awake(4242) is None
    assert mac.table == {}


def test_elsewhere_nothing_is_kept_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    assert awake.keep_awake(os.getpid()) is None


def test_a_boot_is_known_by_its_session_id(mac: Libc) -> None:
    assert clock.boot_id() == clock.session_id() == mac.boots.decode()
    mac.boots = b""
    assert clock.boot_id() is None  # unknown is never equal: such a run counts as cut off by a reboot


def test_the_clock_goes_on_while_the_machine_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delattr(time, "CLOCK_BOOTTIME", raising=False)  # a Mac has none
        importlib.reload(clock)
        assert clock._CLOCK == time.CLOCK_MONOTONIC
    importlib.reload(clock)
    assert getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC) == clock._CLOCK


@pytest.mark.parametrize("refused", [False, True])
def test_a_durable_write_reaches_the_drive_itself(
    mac: Libc, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, refused: bool
) -> None:
    asked: list[int] = []
    synced: list[int] = []

    def control(_descriptor: int, command: int) -> int:
        asked.append(command)
        if refused:
            raise OSError(errno.ENOTSUP, "not on this file system")
        return 0

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", F_FULLFSYNC, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", control)
    monkeypatch.setattr(os, "fsync", synced.append)
    with (tmp_path / "file").open("wb") as file:
        records.durable(file.fileno())
        assert asked == [F_FULLFSYNC]
        assert synced == ([file.fileno()] if refused else [])
    assert mac.table == {}


def bsdinfo(*, pid: int, parent: int, group: int, status: int, start: tuple[int, int]) -> bytes:
    """`struct proc_bsdinfo` (sys/proc_info.h): status at 4, pid at 12, parent at 16, group at 100, start at 120."""
    raw = bytearray(136)
    struct.pack_into("<III", raw, 4, status, 0, pid)
    struct.pack_into("<I", raw, 16, parent)
    struct.pack_into("<I", raw, 100, group)
    struct.pack_into("<QQ", raw, 120, *start)
    return bytes(raw)


def test_a_process_is_named_by_its_pid_and_its_start_to_the_microsecond(mac: Libc) -> None:
    me = os.getpid()
    mac.table[me] = bsdinfo(pid=me, parent=1, group=77, status=2, start=(1_700_000_000, 123_456))
    found = processes.look(me)
    assert found is not None
    assert (found.pid, found.parent, found.group, found.session) == (me, 1, 77, os.getsid(me))
    assert processes.start_of(me) == 1_700_000_000_123_456
    mac.table[me] = bsdinfo(pid=me, parent=1, group=77, status=5, start=(1, 2))
    assert processes.start_of(me) is None  # a zombie
    assert processes.look(999_999) is None


def test_the_environment_comes_after_the_arguments(mac: Libc) -> None:
    mac.arguments[7] = struct.pack("<i", 2) + b"/bin/sleep\0\0\0\0sleep\01000\0HOME=/Users/x\0GPULAYER_RUN_ID=a-1\0\0"
    assert processes.variable(7, "GPULAYER_RUN_ID") == "a-1"
    assert processes.variable(7, "GPULAYER_RUN") is None
    assert processes.variable(8, "GPULAYER_RUN_ID") is None  # hardened, or another user's


def test_there_is_no_subreaper(mac: Libc) -> None:
    assert processes.become_subreaper() is False
    assert mac.table == {}
