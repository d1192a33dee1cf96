"""Which job fits where, for many jobs and hosts at once: equal jobs and equal hosts are judged once.

Jobs that ask for the same thing share a *shape*; hosts whose facts are equal, apart from names and ids, share a
*class*. The rules run once a shape and class; what depends on a host itself (its name, its free disk, who holds its
devices) is added host by host. The result is the same as that of every job against every host.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from gpulayer.gpu.facts import HostFacts
from gpulayer.placement.plan import SHOWN, Code, GroupedRefusal, HostView, Refusal, ShapeVerdict
from gpulayer.placement.rules import Site, site_of
from gpulayer.placement.teams import Team, team_of
from gpulayer.placement.verdicts import UNSURE, Option, Refused, busy, class_verdict, own_refusals
from gpulayer.spec.identity import asked_python, shape_of
from gpulayer.spec.jobs import JobSpec
from gpulayer.spec.support import Accelerator


def class_key(view: HostView, python: str | None = None) -> Hashable:
    """Return all that the rules of a class look at in a host, for jobs of an interpreter (None: the inventory's).

    That is neither its name nor the ids of its devices.
    """
    host, facts = view.host, view.seen_by(python)
    entry = (tuple(sorted(host.labels.items())), host.drain, host.expect, host.max_jobs)
    if facts is None:
        return (*entry, view.stage, view.error)
    return (*entry, facts.arch, *_facts_key(facts))


@dataclass(frozen=True, slots=True)
class Match:
    """Where jobs of one shape fit: the ways to place them, by the host's index in the views, and the verdict in words.

    `shape` is the shape's hash (`spec.identity.shape_of`). `ways` has every accelerator of the job, in its order.
    `sites` are the hosts as the job's interpreter sees them, to which the positions of the ways belong. `team` is what
    they ask of their hosts together; a host with which too few others go together is in none of the ways.
    """

    shape: str
    team: Team
    sites: tuple[Site | None, ...]
    ways: dict[Accelerator, dict[int, Option]]
    verdict: ShapeVerdict


class _Sight:
    """The fleet as one interpreter sees it (None: the inventory's), sorted into classes of equal hosts."""

    def __init__(self, views: Sequence[HostView], python: str | None) -> None:
        self.sites = tuple(site_of(view, python) for view in views)
        classes: dict[Hashable, list[int]] = {}
        for index, view in enumerate(views):
            classes.setdefault(class_key(view, python), []).append(index)
        self.classes = tuple(classes.values())


class Matcher:
    """The fleet in classes; answers for one job at a time and remembers the answer for its shape."""

    def __init__(self, views: Sequence[HostView]) -> None:
        """Stand before the fleet; the order of the views, which is the inventory's, is the order of all results."""
        self.views = tuple(views)
        self._names = tuple(view.host.name for view in views)
        self._sights: dict[str | None, _Sight] = {None: _Sight(self.views, None)}
        # Names of one machine are one machine, as they are for `Packing`.
        self.machines: tuple[Hashable, ...] = tuple(view.domain or index for index, view in enumerate(self.views))
        self._held = {index for index, view in enumerate(self.views) if view.holders or view.slots_held}
        self._shapes: dict[str, Match] = {}
        self._jobs: dict[str, tuple[JobSpec, Match]] = {}

    @property
    def sites(self) -> tuple[Site | None, ...]:
        """The hosts as the inventory's interpreters see them."""
        return self._sights[None].sites

    def match(self, job: JobSpec) -> Match:
        """Return where a job fits; jobs of one shape get the same object."""
        known = self._jobs.get(job.name)
        if known is not None and known[0] is job:
            return known[1]
        shape = shape_of(job)
        match = self._shapes.get(shape)
        if match is None:
            match = self._shapes[shape] = self._judge(job, shape)
        self._jobs[job.name] = (job, match)
        return match

    def _judge(self, job: JobSpec, shape: str) -> Match:
        ways: dict[Accelerator, dict[int, Option]] = {accelerator: {} for accelerator in job.accelerators}
        reasons = _Reasons(self._names)
        python = asked_python(job)
        if python not in self._sights:
            self._sights[python] = _Sight(self.views, python)
        sight = self._sights[python]
        refused_alone = self._refused_alone(job, sight, reasons)
        for members in sight.classes:
            verdict = class_verdict(job, self.views[members[0]], sight.sites[members[0]])
            if isinstance(verdict, Refused):
                for refusal in verdict.refusals:
                    reasons.add(refusal, members)
                continue
            fitting = [index for index in members if index not in refused_alone] if refused_alone else members
            for option in verdict.options:
                ways[option.accelerator] |= dict.fromkeys(fitting, option)
        team = team_of(job, sight.sites)
        if team.nodes > 1:
            self._hold_together(team, ways, reasons)
        for options in ways.values():
            for index in sorted(self._held & options.keys()):
                site = sight.sites[index]
                for refusal in busy(options[index], site, self.views[index]) if site else ():
                    reasons.add(refusal, [index])
        fits = sorted(set().union(*ways.values()))
        names = tuple(map(self._names.__getitem__, fits))
        words = ShapeVerdict(fits=names, refusals=reasons.grouped())
        return Match(shape=shape, team=team, sites=sight.sites, ways=ways, verdict=words)

    def _hold_together(self, team: Team, ways: dict[Accelerator, dict[int, Option]], reasons: _Reasons) -> None:
        """Take out of a gang's ways the hosts with which too few others go together; refused is who has no other."""
        few = {accelerator: team.too_few(accelerator, options, self.machines) for accelerator, options in ways.items()}
        for accelerator, alone in few.items():
            for index in alone:
                del ways[accelerator][index]
        fits: set[int] = set().union(*ways.values())
        for alone in few.values():
            for index, refusal in alone.items():
                if index not in fits:
                    reasons.add(refusal, [index])

    def _refused_alone(self, job: JobSpec, sight: _Sight, reasons: _Reasons) -> set[int]:
        """Return the hosts that are refused for what is theirs alone."""
        if not (job.where.hosts or job.where.not_hosts or job.resources.disk_gb is not None):
            return set()
        refused = set()
        for index, view in enumerate(self.views):
            for refusal in own_refusals(job, view.host, sight.sites[index]):
                reasons.add(refusal, [index])
                refused.add(index)
        return refused


class _Reasons:
    """Refusals of many hosts, equal ones as one entry."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._entries: dict[Hashable, _Entry] = {}

    def add(self, refusal: Refusal, hosts: Sequence[int]) -> None:
        """Take the refusal of these hosts, given by index."""
        key = (
            *(refusal.code, refusal.kind, refusal.accelerator, refusal.memory_kind, refusal.about, refusal.fix),
            repr(refusal.needed),
        )
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry(refusal, [], {}, alone=len(hosts) == 1)
        else:
            entry.alone = False
        entry.hosts += hosts
        entry.found.setdefault(repr(refusal.found), refusal.found)

    def grouped(self) -> tuple[GroupedRefusal, ...]:
        """Return the entries, the nearest to a yes first."""
        return tuple(
            GroupedRefusal(
                hosts=tuple(map(self._names.__getitem__, sorted(set(entry.hosts)))),
                refusal=entry.refusal
                if entry.alone
                else replace(entry.refusal, device=None, found=_cover(list(entry.found.values()))),
            )
            for entry in sorted(
                self._entries.values(), key=lambda entry: (entry.refusal.kind, ORDER[entry.refusal.code])
            )
        )


# The other notes of a probe change no verdict.
TELLING_NOTES: Final = frozenset().union(*UNSURE.values())
ORDER: Final = {code: place for place, code in enumerate(Code)}


@dataclass(slots=True)
class _Entry:
    """One refusal, the hosts that share it (once a device), and the different values that they found."""

    refusal: Refusal
    hosts: list[int]
    found: dict[str, Any]
    alone: bool


def _cover(found: list[Any]) -> object:
    """Return one value for what several hosts or devices found, as `GroupedRefusal` says."""
    if len(found) == 1:
        return found[0]
    if all(isinstance(value, int | float) for value in found):
        return {"from": min(found), "to": max(found)}
    shown: dict[str, Any] = {"any_of": found[:SHOWN]}
    return shown | {"more": len(found) - SHOWN} if len(found) > SHOWN else shown


def _facts_key(facts: HostFacts) -> tuple[Hashable, ...]:
    positions = {device.id: position for position, device in enumerate(facts.devices)}
    return (
        tuple(
            (
                *(
                    device.accelerator,
                    device.name,
                    device.virtual,
                    positions.get(device.parent_id or ""),
                    device.compute_capability,
                ),
                *(device.memory_kind, device.memory_bytes, device.usable_bytes, device.health),
            )
            for device in facts.devices
        ),
        *(facts.cpu_logical, facts.memory_bytes, facts.memory_limit_bytes, facts.python is None),
        facts.capabilities,
        tuple(
            (name, fact.status, fact.version, tuple(sorted(fact.ops.items())), positions.get(fact.ops_device or ""))
            for name, fact in sorted(facts.frameworks.items())
        ),
        frozenset(note.code for note in facts.notes if note.code in TELLING_NOTES),
    )
