"""Which hosts go together: what a distributed job asks of all of its hosts at once. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpulayer.placement.plan import Code, Kind, Refusal
from gpulayer.placement.rules import Site, arch_of, wants_one_arch
from gpulayer.spec.jobs import JobSpec
from gpulayer.spec.support import Accelerator


@dataclass(frozen=True, slots=True)
class Team:
    """How many hosts a job takes, and which go together: those of one kind, on distinct machines; one for most jobs.

    Hosts go by their index. `kinds` are their CPU architectures, or all the same word where that does not matter.
    """

    nodes: int
    kinds: Sequence[str]

    def first(self, hosts: Iterable[int], machines: Sequence[Hashable]) -> list[int] | None:
        """Return the first hosts of an order that go together, as node numbers go: in the inventory's order."""
        teams: dict[str, dict[Hashable, int]] = {}
        for host in hosts:
            team = teams.setdefault(self.kinds[host], {})
            team.setdefault(machines[host], host)
            if len(team) == self.nodes:
                return sorted(team.values())
        return None

    def too_few(
        self, accelerator: Accelerator, hosts: Collection[int], machines: Sequence[Hashable]
    ) -> Mapping[int, Refusal]:
        """Return why hosts that fit one by one are of no use, since too few others go together with them."""
        there = {(machines[host], self.kinds[host]) for host in hosts}
        counts = Counter(kind for _, kind in there)
        refusals = {kind: self._refusal(accelerator, kind, counts) for kind in counts if counts[kind] < self.nodes}
        return {host: refusals[self.kinds[host]] for host in hosts if self.kinds[host] in refusals}

    def _refusal(self, accelerator: Accelerator, kind: str, counts: Mapping[str, int]) -> Refusal:
        more = self.nodes - counts[kind]
        ways = [f"{more} more {f'{kind} ' if len(counts) > 1 else ''}host{' is' if more == 1 else 's are'} needed"]
        if sum(counts.values()) >= self.nodes:
            ways.append("`distributed.mixed_arch: true` lets the ranks run on different CPU architectures")
        others = {other: count for other, count in counts.items() if other != kind}
        return Refusal(
            code=Code.DISTRIBUTED,
            kind=Kind.HOST,
            accelerator=accelerator,
            needed=self.nodes,
            found={kind: counts[kind], **others} if others else counts[kind],
            fix=f"{', or '.join(ways)} (names of one machine count once); or lower `distributed.nodes`",
        )


def team_of(job: JobSpec, sites: Sequence[Site | None]) -> Team:
    """Return what a job asks of its hosts together. Of one that does not answer nothing is known, and nothing taken."""
    nodes = job.nodes or 1
    if not wants_one_arch(job):
        return Team(nodes, ("",) * len(sites))
    return Team(nodes, [(arch_of(site) if site else None) or "" for site in sites])
