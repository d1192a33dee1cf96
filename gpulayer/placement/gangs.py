"""Gangs: how the runs of the nodes of a distributed job become the one run that the job has. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Final

from gpulayer.placement.plan import HostView, KnownRun
from gpulayer.remote import states
from gpulayer.spec.identity import gang_run

# Of several ends the one that speaks for the gang, the worst first; what was cancelled may only follow from another's.
WORST: Final = (
    states.LOST,
    states.FAILED_TO_START,
    states.TIMED_OUT,
    states.LOG_CAPPED,
    states.SIGNALED,
    states.EXITED,
    states.CANCELLED,
)
OK: Final = (states.EXITED, 0)


def together(runs: Iterable[KnownRun]) -> list[KnownRun]:
    """Return the runs with those of a gang's nodes as one, in its first one's place; others are returned as they are.

    A record of the gang as a whole says nothing that its nodes do not say better, and gives way to them.
    """
    runs = list(runs)
    gangs: dict[str, dict[int, KnownRun]] = {}
    for run in runs:
        if run.node is not None:
            gangs.setdefault(gang_run(run.run, run.node), {})[run.node] = run
    found: list[KnownRun] = []
    told: set[str] = set()
    for run in runs:
        name = run.run if run.node is None else gang_run(run.run, run.node)
        if name not in gangs:
            found.append(run)
        elif name not in told:
            found.append(_as_one(name, gangs[name]))
            told.add(name)
    return found


def known_now(views: Iterable[HostView], history: Iterable[KnownRun]) -> list[KnownRun]:
    """Return the runs that hosts know, those of a gang's nodes as one, each on the host that tells of it.

    What two names of a machine tell counts once. A gang's node whose host does not answer is `unknown`, unless the
    history has its end.
    """
    views = list(views)
    told = {run.run: replace(run, host=view.host.name) for view in views for run in view.runs}
    answering = {view.host.name for view in views if view.reached}
    gangs = {gang_run(run.run, run.node) for run in told.values() if run.node is not None}
    for run in history:
        for part in run.members if run.run in gangs else ():
            if part.run not in told and part.host not in answering:
                silent = replace(part, status=states.UNKNOWN, reason=f"{part.host} does not answer")
                told[part.run] = part if part.status in states.FINAL else silent
    return together(told.values())


def _as_one(name: str, by_node: dict[int, KnownRun]) -> KnownRun:
    members = tuple(run for _, run in sorted(by_node.items()))
    first = members[0]
    nodes = max(first.nodes or 0, len(members))
    status, speaker, reason = _word(members, [node for node in range(nodes) if node not in by_node])
    ends = [run.ended_at for run in members if run.ended_at]
    return KnownRun(
        run=name,
        job=first.job,
        key=first.key,
        attempt=first.attempt,
        host=first.host,
        status=status,
        devices=first.devices,
        code=speaker.code if speaker else None,
        signal=speaker.signal if speaker else None,
        reason=reason,
        started_at=min((run.started_at for run in members if run.started_at), default=None),
        ended_at=max(ends, default=None) if status in states.FINAL else None,
        nodes=nodes,
        first_failure=next((run.first_failure for run in members if run.first_failure), None),
        members=members,
    )


def _word(members: Collection[KnownRun], missing: Collection[int]) -> tuple[str, KnownRun | None, str | None]:
    """Return the gang's status, the node's run whose code and signal are the gang's, and the reason.

    What one node's host does not tell is unknown for the gang. A gang succeeds where every node exited with 0.
    """
    for run in members:
        if run.status == states.UNKNOWN:
            return states.UNKNOWN, None, run.reason
    ended = [run for run in members if run.status in states.FINAL]
    if len(ended) < len(members):
        return _life(members, ended), None, next((run.reason for run in members if run.reason), None)
    failure = next((run.first_failure for run in members if run.first_failure), None)
    host = failure.host if failure else None
    speaker = min(
        members,
        key=lambda run: ((run.status, run.code) == OK, run.host != host, WORST.index(run.status), run.node or 0),
    )
    if failure and failure.rank is None and speaker.status == states.CANCELLED:
        return states.LOST, None, f"{failure.host} was lost"  # it lives, cut off: it says the same of the others
    if missing and (speaker.status, speaker.code) == OK:
        return states.LOST, None, f"no host knows how node {min(missing)} ended"
    return speaker.status, speaker, speaker.reason


def _life(members: Collection[KnownRun], ended: Collection[KnownRun]) -> str:
    """Return the word for a gang of which something lives: it is stopping once any of it ended badly or is to end."""
    words = {run.status for run in members}
    if words & {states.STOPPING, states.ORPHANED} or any((run.status, run.code) != OK for run in ended):
        return states.STOPPING
    return next((word for word in (states.QUEUED, states.LAUNCHING) if word in words and not ended), states.RUNNING)
