"""What must hold after every fault, read from what the jobs themselves have written on their hosts.

Each job notes its start and its end in a journal of its host, and holds a lock of its own on each device as long as
any of its processes lives: neither knows anything of GPUlayer's records.

    start RUN PID UPTIME DEVICES       end RUN CODE UPTIME DEVICES       overlap RUN DEVICES
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpulayer.placement.plan import KnownRun
from gpulayer.remote import states
from gpulayer.run.store import Store
from tests.faults.hosts import LIMIT, PoweredHost, wait_until
from tests.run.project import Project

_NOTE = 'read up _ < /proc/uptime; echo "start $GPULAYER_RUN_ID $$ $up ${GPULAYER_DEVICES:--}" >> ~/journal'
_END = 'read up _ < /proc/uptime; echo "end $GPULAYER_RUN_ID %d $up ${GPULAYER_DEVICES:--}" >> ~/journal; exit %d'
_WITNESS = (
    'exec 9>> ~/"witness-$GPULAYER_DEVICES"; '
    'flock -n 9 || echo "overlap $GPULAYER_RUN_ID $GPULAYER_DEVICES" >> ~/journal'
)


def journaled(body: str = ":", *, code: int = 0, device: bool = False) -> str:
    """Return a command that notes its start, does `body`, notes its end and exits with `code`."""
    return "; ".join([*([_WITNESS] if device else []), _NOTE, body, _END % (code, code)])


@dataclass(kw_only=True)
class Journal:
    """What the jobs of some hosts have written."""

    starts: Counter[str] = field(default_factory=Counter)
    ends: dict[str, int] = field(default_factory=dict)
    overlaps: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, hosts: Iterable[PoweredHost]) -> Journal:
        """Read the journals of these hosts."""
        journal = cls()
        for host in hosts:
            journal.read(host.home / "journal")
        return journal

    def read(self, path: Path) -> None:
        """Add one host's journal. Jobs that name one device take turns in it, line by line."""
        holders: dict[str, str] = {}
        for line in path.read_text().splitlines() if path.exists() else []:
            word, run, *rest = line.split()
            if word == "start":
                self.starts[run] += 1
                holders[rest[-1]] = run
            elif word == "end":
                self.ends[run] = int(rest[0])
                if rest[-1] != "-" and holders.get(rest[-1]) != run:
                    self.overlaps.append(line)
            else:
                self.overlaps.append(line)


@dataclass(kw_only=True)
class Records:
    """What the hosts have written of runs, by run id: their ends, of which there is one or none, and their logs."""

    ends: defaultdict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    logs: dict[str, Path] = field(default_factory=dict)

    @classmethod
    def of(cls, hosts: Iterable[PoweredHost]) -> Records:
        """Read them, each file once: a thousand runs have many. Of what `gc` has removed a tombstone holds the end."""
        records = cls()
        for state in [path.parent for host in hosts for path in host.home.rglob("runs")]:
            ends = {path.stem: path for path in state.glob("done/*.json")}
            ends |= {path.parent.name: path for path in state.glob("runs/*/exit.json")}
            for run, path in ends.items():
                records.ends[run].append(json.loads(path.read_text())["state"])
            records.logs |= {path.parent.name: path for path in state.glob("runs/*/output.log")}
        return records


def check(projects: Iterable[Project], hosts: Iterable[PoweredHost]) -> Journal:
    """Hold (a) at most one start, (b) no overlap, (c) true verdicts, (e) equal logs, (f) no unproven success."""
    hosts = list(hosts)
    journal, records = Journal.of(hosts), Records.of(hosts)
    assert not [run for run, count in journal.starts.items() if count > 1]
    assert not journal.overlaps
    for project in projects:
        with Store.open(project.folder) as store:
            runs = store.runs(project.name)
            collected = store.collected()
        for run in runs:
            fault = contradiction(run, journal)
            assert fault is None, f"{run}: {fault}"
            if run.status == states.EXITED and run.code == 0:
                assert [(end["status"], end["code"]) for end in records.ends[run.run]] == [(states.EXITED, 0)], run
            if run.run in collected and run.run in records.logs:  # else `gc` has removed it
                assert project.local_log(run.run) == records.logs[run.run].read_bytes()
    return journal


def contradiction(run: KnownRun, journal: Journal) -> str | None:
    """Return how a controller's verdict on a run does not agree with the journal, or None."""
    started, ended = journal.starts[run.run], journal.ends.get(run.run)
    if run.status == states.EXITED:
        return None if ended == run.code and started else f"its end was {ended}"
    if run.status in {states.SIGNALED, states.TIMED_OUT} and not started:
        return "it never started"
    never = run.status == states.FAILED_TO_START or run.reason == "never_started" or run.status == states.QUEUED
    return "it was started" if never and started else None


def check_nothing_is_left(hosts: Iterable[PoweredHost], limit: float = LIMIT) -> None:
    """Hold (d): no process of a job, no supervisor, no agent, no lock. Call it when no controller is connected.

    What is about to end has `limit` seconds for it.
    """
    for host in hosts:
        wait_until(lambda host=host: not host.inside(), limit)  # type: ignore[misc]
        leases = Path(host.host.lease_dir or "")
        held = [path for path in [*host.home.rglob("runs/*/lock"), *leases.glob("device-*"), *leases.glob("slot-*")]
                if is_locked(path)]  # fmt: skip
        assert not held


def is_locked(path: Path) -> bool:
    """Tell whether somebody holds a lock on a file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(descriptor)


def most_connections(journal: str) -> int:
    """Return the most connections that were open at once, by what sshd has logged of each one's begin and end."""
    opened: set[str] = set()
    most = 0
    for line in journal.splitlines():
        if begun := re.match(r"Connection from \S+ port (\d+) on ", line):
            opened.add(begun[1])
            most = max(most, len(opened))
        elif ended := re.match(r"(?:Disconnected from|Connection (?:closed|reset) by) .*?port (\d+)", line):
            opened.discard(ended[1])
    return most
