"""The order in which jobs start: that of the document, and nobody waits while a device that fits is free.

Jobs that cannot start let later ones pass. So that a wide job does not starve, later jobs may pass it `PATIENCE` times
after the first round; then a machine, or as many as a gang has nodes, is kept free for it until it has started.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final, NamedTuple

from gpulayer.placement.packing import Packing, Search
from gpulayer.placement.plan import Placement
from gpulayer.spec.jobs import JobSpec
from gpulayer.spec.support import Accelerator

# How many later jobs may pass a waiting one, on hosts where it fits, before a machine is kept free for it.
PATIENCE: Final = 16


class Start(NamedTuple):
    """A job that starts now, and where: one placement, or one a node of a gang. Its place is taken."""

    job: JobSpec
    accelerator: Accelerator
    placements: tuple[Placement, ...]


@dataclass(slots=True)
class _Line:
    """Waiting jobs of one shape as (position, name). `passed` counts the later jobs that passed its first."""

    search: Search
    waiting: list[tuple[int, str]] = field(default_factory=list)
    passed: int = 0


class Queue:
    """Jobs that wait for a place of a `Packing`."""

    def __init__(self, packing: Packing) -> None:
        """Stand before an empty queue; the queue takes places, whoever runs the jobs releases them."""
        self._packing = packing
        self._jobs: dict[str, JobSpec] = {}
        self._lines: dict[int, _Line] = {}
        self._rounds = 0

    def __len__(self) -> int:
        """Return how many jobs wait."""
        return len(self._jobs)

    def __contains__(self, job: object) -> bool:
        """Whether the job of this name waits."""
        return job in self._jobs

    def add(self, job: JobSpec, position: int, allowed: frozenset[str] | None = None) -> None:
        """Let a job wait at its position in the order, for a place on the hosts `allowed` (None: on any)."""
        search = self._packing.search(job, allowed)
        line = self._lines.setdefault(id(search), _Line(search))
        heappush(line.waiting, (position, job.name))
        self._jobs[job.name] = job

    def remove(self, job: str) -> None:
        """Take a job out that shall not run. Raises KeyError where it does not wait."""
        del self._jobs[job]
        self._packing.forgo(job)

    def ready(self) -> list[Start]:
        """Take the places of all jobs that can start now, in their order."""
        started: list[Start] = []
        passed: list[tuple[_Line, int]] = []
        heads = [(first, key) for key, line in self._lines.items() if (first := self._first(line)) is not None]
        heapify(heads)
        while heads:
            (_, name), key = heads[0]
            line, job = self._lines[key], self._jobs[name]
            place = self._packing.first(line.search, name)
            if place is None:
                heappop(heads)
                passed.append((line, len(started)))
                continue
            self._packing.occupy(job, *place)
            started.append(Start(job, *place))
            self._leave(line, name)
            following = self._first(line)
            if following is None:
                heappop(heads)
            else:
                heapreplace(heads, (following, key))
        if self._rounds:
            self._count(passed, started)
        self._rounds += 1
        return started

    def _first(self, line: _Line) -> tuple[int, str] | None:
        while line.waiting and line.waiting[0][1] not in self._jobs:
            heappop(line.waiting)
        return line.waiting[0] if line.waiting else None

    def _leave(self, line: _Line, name: str) -> None:
        heappop(line.waiting)
        del self._jobs[name]
        line.passed = 0

    def _count(self, passed: list[tuple[_Line, int]], started: list[Start]) -> None:
        for line, mark in passed:
            line.passed += sum(_is_on(start, line.search.hosts) for start in started[mark:])
            if line.passed >= PATIENCE:
                self._packing.reserve(line.search, line.waiting[0][1])


def _is_on(start: Start, hosts: frozenset[str]) -> bool:
    return any(placement.host in hosts for placement in start.placements)
