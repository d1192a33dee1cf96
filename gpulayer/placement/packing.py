"""What is free on the fleet while jobs come and go, and which job is next.

GPU jobs go to the least capable device that fits, and fill a host before they open the next one, so that big devices
and whole hosts stay free for those who need them. CPU jobs go to the host with the smallest share of its slots taken.
A preference list takes its first accelerator with a free fitting device (design rule 9).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final, NamedTuple

from gpulayer.placement.matching import Match, Matcher
from gpulayer.placement.plan import HostView, Placement
from gpulayer.placement.rules import Site, cpus_taken, memory_taken
from gpulayer.placement.teams import Team
from gpulayer.placement.verdicts import Option
from gpulayer.spec.jobs import JobSpec
from gpulayer.spec.support import Accelerator

# What a host is preferred by, the smaller the better: the taken share of its CPU slots (0 for a GPU job), the rank of
# the option, the host's index.
Rank = tuple[float, tuple[float, int], int]

# Where a job starts: under one accelerator, on one host, or on as many as a gang has nodes, in node order.
Place = tuple[Accelerator, tuple[Placement, ...]]

# Loads change while a search rests. It looks again at so many hosts before it takes the best of them: enough to spread
# jobs evenly, and a bound on the work for each job.
LOOKS: Final = 4


@dataclass(slots=True, eq=False)
class _Machine:
    """The free state of one machine, which several names of the inventory may share. Sizes are bytes.

    `devices` are the ids of all GPUs, `foreign` those held by others than our jobs, `ours` those that our jobs have,
    `free` the rest; `foreign_slots` are CPU slots that others hold, one CPU each; `foreign_memory` is what others have
    of the memory, as far as the host has said so since something last changed there. `load` is the taken share of the
    CPU slots. `reserved` is the job for which the machine is kept. `parked` are the searches that found too little
    free here; they look again when something comes free. Unknown memory (None) is not counted: no job that demands
    some fits there.
    """

    slots: int = 0
    cpus: int = 0
    memory: int | None = None
    devices: set[str] = field(default_factory=set)
    foreign: set[str] = field(default_factory=set)
    ours: set[str] = field(default_factory=set)
    free: set[str] = field(default_factory=set)
    foreign_slots: int = 0
    foreign_memory: int = 0
    slots_used: int = 0
    cpus_used: int = 0
    memory_used: int = 0
    load: float = 0
    reserved: str | None = None
    parked: list[tuple[list[Rank], Rank]] = field(default_factory=list)

    def add(self, site: Site, view: HostView) -> None:
        """Take what one name of this machine says of it; where two differ, the lower limit holds."""
        self.slots = min(site.slots, self.slots or site.slots)
        self.cpus = max(self.cpus, self.slots, site.facts.cpu_logical or 1)
        self.memory = site.memory if self.memory is None else min(self.memory, site.memory or self.memory)
        for facts in (site.facts, *view.pythons.values()):  # a device may be seen by one interpreter alone
            self.devices.update(device.id for device in facts.devices if device.accelerator != Accelerator.CPU)
        self.foreign.update(view.holders)
        self.foreign_slots = max(self.foreign_slots, view.slots_held)
        self.count()

    def has_room(self, option: Option, job: str) -> bool:
        """Whether devices, slots, CPUs and memory suffice for the job of this name, whichever devices it needs."""
        return (
            len(self.free) >= option.count
            and (self.reserved is None or self.reserved == job)
            and (not option.slot or self.slots_used + self.foreign_slots < self.slots)
            and (not option.cpus or self.cpus_used + self.foreign_slots + option.cpus <= self.cpus)
            and (self.memory is None or self.memory_used + self.foreign_memory + option.memory <= self.memory)
        )

    def count(self) -> None:
        """Take anew what follows from who has what."""
        self.free = self.devices - self.foreign - self.ours
        self.weigh()

    def weigh(self) -> None:
        """Take the load anew."""
        self.load = (self.slots_used + self.foreign_slots) / (self.slots or 1)

    def wake(self) -> None:
        """Let the parked searches look at this machine again, where something came free."""
        self.foreign_memory = 0
        self.count()
        for search, rank in self.parked:
            heappush(search, (min(rank[0], self.load), rank[1], rank[2]))
        self.parked.clear()


class _Taken(NamedTuple):
    """What one job has of one machine."""

    machine: _Machine
    devices: tuple[str, ...]
    cpus: int
    memory: int
    slots: int


@dataclass(frozen=True, slots=True)
class Search:
    """Where jobs of one shape may go, the best host first, for each accelerator in the order of preference.

    `sites` are the hosts as these jobs' interpreter sees them, `team` is what they ask of their hosts together.
    """

    team: Team
    sites: tuple[Site | None, ...]
    lanes: tuple[tuple[dict[int, Option], list[Rank]], ...]
    hosts: frozenset[str]


class Packing:
    """The mutable free state of the fleet. `place` looks, `occupy` takes, `release` gives back; nothing here waits."""

    def __init__(self, views: Sequence[HostView], *, matcher: Matcher | None = None) -> None:
        """Start from all hosts of the inventory as they are; names with an equal `domain` are one machine."""
        self._matcher = matcher or Matcher(views)
        self._names = tuple(view.host.name for view in views)
        self._index = {name: index for index, name in enumerate(self._names)}
        by_identity: dict[Hashable, _Machine] = {}
        self._machines = [by_identity.setdefault(machine, _Machine()) for machine in self._matcher.machines]
        for machine, site, view in zip(self._machines, self._matcher.sites, views, strict=True):
            if site is not None:
                machine.add(site, view)
        self._taken: dict[str, list[_Taken]] = {}
        self._reserved: dict[str, list[_Machine]] = {}
        self._searches: dict[tuple[str, frozenset[str] | None], Search] = {}

    def place(self, job: JobSpec, allowed: frozenset[str] | None = None) -> Place | None:
        """Return where a job can start now, or None where nothing that fits is free. Takes nothing.

        `allowed` names the hosts to which it is restricted.
        """
        return self.first(self.search(job, allowed), job.name)

    def search(self, job: JobSpec, allowed: frozenset[str] | None = None) -> Search:
        """Return the search that all jobs of this shape share."""
        match = self._matcher.match(job)
        key = (match.shape, allowed)
        found = self._searches.get(key)
        if found is None:
            found = self._searches[key] = self._search(match, allowed)
        return found

    def first(self, search: Search, job: str) -> Place | None:
        """Return the first place of a search that is free now for the job of this name."""
        if search.team.nodes > 1:
            return self._first_gang(search, job)
        for options, ranks in search.lanes:
            looks = LOOKS
            while ranks:
                rank = ranks[0]
                host = rank[2]
                machine, option = self._machines[host], options[host]
                if option.slot and looks and (load := machine.load) > rank[0]:
                    looks -= 1
                    heapreplace(ranks, (load, rank[1], host))
                    continue
                if (
                    machine.has_room(option, job)
                    and (devices := _free(machine, option, search.sites[host])) is not None
                ):
                    return option.accelerator, (Placement(host=self._names[host], devices=devices),)
                machine.parked.append((ranks, heappop(ranks)))
        return None

    def occupy(self, job: JobSpec, accelerator: Accelerator, placements: Sequence[Placement]) -> None:
        """Take a place for a job that is about to start. Raises ValueError where the job has one already."""
        if job.name in self._taken:
            raise ValueError(f"{job.name} has its place already")
        self.forgo(job.name)
        sites = self._matcher.match(job).sites
        self._taken[job.name] = [self._take(job, accelerator, placement, sites) for placement in placements]

    def adopt(self, job: JobSpec, accelerator: Accelerator, placements: Sequence[Placement]) -> None:
        """Count a run that was going on when the hosts were asked as the job's: what it holds is in the views.

        Of hosts that are no longer in the inventory nothing is counted.
        """
        here = [placement for placement in placements if placement.host in self._index]
        for placement in here:
            machine = self._machines[self._index[placement.host]]
            for device in placement.devices:
                machine.foreign.discard(device)
            if accelerator is Accelerator.CPU:
                machine.foreign_slots = max(0, machine.foreign_slots - 1)
        self.occupy(job, accelerator, here)

    def release(self, job: str) -> None:
        """Give back what a job has. Raises KeyError where it has nothing."""
        for taken in self._taken.pop(job):
            machine = taken.machine
            machine.ours.difference_update(taken.devices)
            machine.cpus_used -= taken.cpus
            machine.memory_used -= taken.memory
            machine.slots_used -= taken.slots
            machine.wake()

    def observe(self, view: HostView) -> None:
        """Take a host's newer answer to who holds what; what our own jobs have stays theirs.

        A job that could not start, since others hold its device, is to be released first.
        """
        machine = self._machines[self._index[view.host.name]]
        machine.foreign = set(view.holders) - machine.ours
        machine.foreign_slots = max(0, view.slots_held - machine.slots_used)
        machine.wake()

    def limit_memory(self, host: str, free: int) -> None:
        """Take a host's word that only `free` bytes of memory can be had there, until something changes there."""
        machine = self._machines[self._index[host]]
        if machine.memory is not None:
            machine.foreign_memory = max(0, machine.memory - machine.memory_used - free)

    def reserve(self, search: Search, job: str) -> None:
        """Keep a machine for a job, or one for each node of a gang: those with the fewest of our jobs on them.

        All of them or none, so that two gangs never wait for each other; and only such as others leave enough of, so
        that nothing is kept in vain: what they take later is kept no longer.
        """
        teams: list[tuple[int, list[int]]] = []
        for options, _ in search.lanes:
            ours = {
                host: len(machine.ours) + machine.slots_used
                for host, option in options.items()
                if self._names[host] in search.hosts
                and (machine := self._machines[host]).reserved in {None, job}
                and _is_left(machine, option, search.sites[host])
            }
            if team := search.team.first(sorted(ours, key=lambda host: (ours[host], host)), self._machines):
                teams.append((sum(ours[host] for host in team), team))
        kept = [self._machines[host] for host in min(teams)[1]] if teams else []
        if kept != self._reserved.get(job, []):
            self.forgo(job)
            self._reserved[job] = kept
            for machine in kept:
                machine.reserved = job

    def forgo(self, job: str) -> None:
        """End the reservation that a job may have."""
        for machine in self._reserved.pop(job, ()):
            machine.reserved = None
            machine.wake()

    def _first_gang(self, search: Search, job: str) -> Place | None:
        """Return hosts for all nodes of a gang that are free at once, under its first accelerator that has them."""
        for options, ranks in search.lanes:
            free: dict[int, tuple[str, ...]] = {}
            order: list[Rank] = []
            for _, rank, host in ranks:
                machine, option = self._machines[host], options[host]
                if (
                    machine.has_room(option, job)
                    and (devices := _free(machine, option, search.sites[host])) is not None
                ):
                    free[host] = devices
                    order.append((machine.load if option.slot else 0, rank, host))
            team = search.team.first((host for _, _, host in sorted(order)), self._machines)
            if team is not None:
                places = tuple(Placement(host=self._names[host], devices=free[host]) for host in team)
                return options[team[0]].accelerator, places
        return None

    def _search(self, match: Match, allowed: frozenset[str] | None) -> Search:
        fits = frozenset(match.verdict.fits)
        hosts = fits if allowed is None else fits & allowed
        lanes = []
        for accelerator, options in match.ways.items():
            here = list(options.items())
            if hosts != fits:
                here = [(index, option) for index, option in here if self._names[index] in hosts]
            if accelerator is Accelerator.CPU:
                ranks: list[Rank] = [(self._machines[index].load, option.rank, index) for index, option in here]
            else:
                ranks = [(0, option.rank, index) for index, option in here]
            heapify(ranks)
            lanes.append((options, ranks))
        return Search(match.team, match.sites, tuple(lanes), hosts)

    def _take(
        self, job: JobSpec, accelerator: Accelerator, placement: Placement, sites: Sequence[Site | None]
    ) -> _Taken:
        index = self._index[placement.host]
        machine, site = self._machines[index], sites[index]
        taken = _Taken(
            machine=machine,
            devices=placement.devices,
            cpus=cpus_taken(job, accelerator),
            memory=memory_taken(job, accelerator, site) if site else 0,
            slots=1 if accelerator is Accelerator.CPU else 0,
        )
        machine.ours.update(placement.devices)
        machine.free.difference_update(placement.devices)
        machine.cpus_used += taken.cpus
        machine.memory_used += taken.memory
        machine.slots_used += taken.slots
        machine.weigh()
        return taken


def _free(machine: _Machine, option: Option, site: Site | None) -> tuple[str, ...] | None:
    """Return the devices that such a job would take of a machine now; None where too few that it may have are free."""
    if site is None:
        return None
    seen = site.facts.devices
    free = [device for position in option.positions if (device := seen[position].id) in machine.free]
    return tuple(free[: option.count]) if len(free) >= option.count else None


def _is_left(machine: _Machine, option: Option, site: Site | None) -> bool:
    """Tell whether others leave enough of a machine for such a job, once our own jobs there have ended."""
    ids = {site.facts.devices[position].id for position in option.positions} if site else set()
    slots = not option.slot or machine.foreign_slots < machine.slots
    return slots and len(ids - machine.foreign) >= option.count
