"""Ask the hosts: what they are, what holds their devices, and which runs of a project they know."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import WeakKeyDictionary

from gpulayer.errors import HostError, Stage, UsageError
from gpulayer.fleet.session import AgentError, Fleet, Session, unable
from gpulayer.gpu.facts import BadReportError, HostFacts, facts_from_report
from gpulayer.placement.gangs import known_now
from gpulayer.placement.plan import HostView, KnownRun
from gpulayer.remote import states
from gpulayer.remote.wire import ProtocolError, parse
from gpulayer.run.replies import NAME, BadReplyError, Reader, RunState, run_state
from gpulayer.spec.inventory import Host, Inventory

FLEET_SCHEMA: Final = "gpulayer.fleet/1"
# Seconds; the probe's own deadlines are 10 s shorter. Torch's first import on a cold disk takes tens of them.
PROBE_LIMIT: Final = 130.0
DEEP_PROBE_LIMIT: Final = 310.0
ASIDE_LIMIT: Final = 5.0  # seconds that one host is waited for before a launch on another
RECENT: Final = 5.0  # seconds for which a probe holds over one connection: who plans and applies at once looks once

MOST_RUNS: Final = 100_000
"""Runs of one project that a host may tell of. More are no history but a flood."""

LAST: Final = "z" * 63  # no run id sorts after it: a survey from there on lists no runs

Seen = tuple[Mapping[str, Any], HostFacts]
_SEEN: Final[WeakKeyDictionary[Session, dict[Hashable, tuple[float, Seen]]]] = WeakKeyDictionary()


class BadFleetError(UsageError):
    """A saved fleet does not hold; says which of its hosts, and what of it."""

    def __init__(self, message: str, *, fix: str = "save one with `gpulayer probe --json > FILE`") -> None:
        """`message` is one sentence without the file's name."""
        super().__init__(message, fix=fix)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surveyed:
    """One host's answer: the view that planning uses, and the raw probe report (None where there is none).

    `python` is the interpreter that the report is of, as it was named; None is whichever the host has. `identity` is
    the random id of the host's state folder, None where the host was not reached.
    """

    view: HostView
    report: Mapping[str, Any] | None = None
    python: str | None = None
    states: tuple[RunState, ...] = ()
    identity: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked of every host.

    `project` None asks for no runs and holders; `frameworks` None asks for no probe. `python` is probed in the place of
    the inventory's interpreter, and `pythons` besides: each for the frameworks that are named with it. `deep` tries
    operators and dtypes.
    """

    project: str | None = None
    frameworks: tuple[str, ...] | None = ()
    python: str | None = None
    pythons: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fresh: bool = False
    deep: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """What is taken on a host: `holders` {device id: run id or text}, and how many CPU slots."""

    holders: Mapping[str, str]
    slots_held: int


async def survey(fleet: Fleet, hosts: Iterable[Host], question: Question) -> list[Surveyed]:
    """Ask all hosts at once, and answer in their order. A host that fails is not reached, with the stage and why."""
    hosts = list(hosts)
    found = await fleet.connect([host.name for host in hosts])
    answers = await asyncio.gather(*(_survey(host, found[host.name], question) for host in hosts))
    return _one_name_a_host(answers)


async def _survey(host: Host, session: Session | HostError, question: Question) -> Surveyed:
    if isinstance(session, HostError):
        return _unreached(host, session)
    try:
        hello = Reader(host.name, session.hello)
        domain, identity = (hello.text("boot_id"), hello.text("lease_dir")), hello.text("host_id")
        asked = _probes(session, question), _known_runs(session, question.project)
        (report, facts, pythons), (taken, states) = await asyncio.gather(*asked)
    except HostError as error:
        return _unreached(host, error)
    except AgentError as error:
        return _unreached(host, unable(error))
    view = HostView(
        host=host,
        reached=True,
        facts=facts,
        pythons=pythons,
        domain=domain,
        holders=taken.holders,
        slots_held=taken.slots_held,
        runs=tuple(state.run for state in states),
    )
    python = question.python or session.python
    return Surveyed(view=view, report=report, python=python, states=states, identity=identity)


async def _probes(
    session: Session, question: Question
) -> tuple[Mapping[str, Any] | None, HostFacts | None, Mapping[str, HostFacts]]:
    """Return the report and the facts of the first interpreter, and the facts of the others by their names.

    Each is asked once, one after the other: two frameworks that start at once can be more than a host's memory holds.
    """
    if question.frameworks is None:
        return None, None, {}
    first = question.python or session.python
    asked: dict[str | None, tuple[str, ...]] = {first: question.frameworks}
    for python, frameworks in question.pythons.items():
        asked[python] = tuple(dict.fromkeys((*asked.get(python, ()), *frameworks)))
    found = {python: await _probe(session, question, python, names) for python, names in asked.items()}
    report, facts = found[first]
    return report, facts, {python: found[python][1] for python in question.pythons}


async def _probe(session: Session, question: Question, python: str | None, frameworks: Collection[str]) -> Seen:
    asked, seen = (python, frozenset(frameworks), question.deep), _SEEN.setdefault(session, {})
    if not question.fresh and asked in seen and time.monotonic() - seen[asked][0] < RECENT:
        return seen[asked][1]
    seen[asked] = time.monotonic(), await _ask_probe(session, question, python, frameworks)
    return seen[asked][1]


async def _ask_probe(session: Session, question: Question, python: str | None, frameworks: Collection[str]) -> Seen:
    reply = await session.request(
        "probe",
        timeout=DEEP_PROBE_LIMIT if question.deep else PROBE_LIMIT,
        python=python,
        frameworks=list(frameworks),
        fresh=question.fresh,
        deep=question.deep,
    )
    try:
        report = parse(reply.payload)
        return report, facts_from_report(report)
    except (BadReportError, ProtocolError) as error:
        raise HostError(
            session.name, Stage.PROTOCOL, f"the probe's report does not hold: {error}",
            fix="run `python -m gpulayer.probe` on the host and look at what it prints",
        ) from error  # fmt: skip


async def _known_runs(session: Session, project: str | None) -> tuple[Occupancy, tuple[RunState, ...]]:
    if project is None:
        return Occupancy(holders={}, slots_held=0), ()
    return await known_runs(session, project)


async def known_runs(session: Session, project: str) -> tuple[Occupancy, tuple[RunState, ...]]:
    """Return what is taken on a host and every run of a project that it knows."""
    states: list[RunState] = []
    after: str | None = None
    while True:
        reply = Reader(session.name, (await session.request("survey", project=project, after=after)).header)
        page = [run_state(session.name, state) for state in reply.items("runs")]
        taken = Occupancy(holders=reply.table("holders"), slots_held=reply.number("slots_held"))
        states += page
        if len(states) > MOST_RUNS:
            raise BadReplyError(
                session.name, f"it tells of more than {MOST_RUNS:,} runs of project {project}",
                fix="give the project another `name`, or the host another `state_dir`",
            )  # fmt: skip
        if not reply.get("more"):
            return taken, tuple(states)
        if not page or (after is not None and page[-1].run.run <= after):
            raise reply.bad("more")  # a host that promises more for ever would hold us for ever
        after = page[-1].run.run


async def occupancy(session: Session, project: str) -> Occupancy:
    """Return what is taken on a host now."""
    reply = Reader(session.name, (await session.request("survey", project=project, after=LAST)).header)
    return Occupancy(holders=reply.table("holders"), slots_held=reply.number("slots_held"))


async def told_of(fleet: Fleet, host: str, runs: Sequence[str]) -> list[RunState]:
    """Return the runs among these that a host knows; none where it does not answer at once."""
    try:
        async with asyncio.timeout(ASIDE_LIMIT):
            session = await fleet.session(host)
            told = Reader(host, (await session.request("status", runs=list(runs))).header).get("states")
        known = told if isinstance(told, Mapping) else {}
        return [run_state(host, known[run]) for run in runs if known.get(run) is not None]
    except (HostError, AgentError, TimeoutError):
        return []


def _unreached(host: Host, error: HostError) -> Surveyed:
    view = HostView(host=host, reached=False, stage=error.stage, error=error.reason, fix=error.fix)
    return Surveyed(view=view)


def _one_name_a_host(answers: Iterable[Surveyed]) -> list[Surveyed]:
    """Let a state folder answer under one name alone: its runs would be counted twice, and found under either."""
    first: dict[str, str] = {}
    result: list[Surveyed] = []
    for answer in answers:
        host = answer.view.host
        other = host.name if answer.identity is None else first.setdefault(answer.identity, host.name)
        if other == host.name:
            result.append(answer)
            continue
        error = HostError(
            host.name, Stage.PROTOCOL, f"this is the host that the inventory names {other!r} already",
            fix="leave one of the two names out, or give each its own state_dir",
        )  # fmt: skip
        result.append(_unreached(host, error))
    return result


def new_here(views: Iterable[HostView], history: Iterable[KnownRun]) -> list[KnownRun]:
    """Return what hosts know of a project and the local history does not, oldest first.

    That is all that has not ended, and of what has ended each job's newest run: what another controller started, or
    this one before its history was lost.
    """
    here = {run.run: run for run in history}
    there = known_now(views, here.values())
    newest = {run.job: run.run for run in sorted((*here.values(), *there), key=_begun)}
    return [
        run for run in sorted(there, key=_begun)
        if run.run not in here and (run.status not in states.FINAL or newest[run.job] == run.run)
    ]  # fmt: skip


def _begun(run: KnownRun) -> tuple[str, int]:
    return run.started_at or "", run.attempt


def fleet_document(surveyed: Iterable[Surveyed]) -> dict[str, Any]:
    """Return the `gpulayer.fleet/1` document that `probe --json` prints."""
    return {
        "schema": FLEET_SCHEMA,
        "hosts": [
            {
                "name": answer.view.host.name,
                "reached": answer.view.reached,
                "stage": answer.view.stage.value if answer.view.stage else None,
                "error": answer.view.error,
                "fix": answer.view.fix,
                "python": answer.python,
                "report": answer.report,
            }
            for answer in surveyed
        ],
    }


def views_from_fleet(document: object, inventory: Inventory | None = None) -> list[HostView]:
    """Return the hosts of a saved fleet as views, all of them free; an inventory adds labels, drain and limits by name.

    BadFleetError where the document does not hold.
    """
    if not isinstance(document, Mapping) or document.get("schema") != FLEET_SCHEMA:
        raise BadFleetError(f"this is not a {FLEET_SCHEMA} document")
    hosts = document.get("hosts")
    if not isinstance(hosts, list):
        raise BadFleetError("the fleet has no list of hosts")
    views: dict[str, HostView] = {}
    for place, entry in enumerate(hosts):
        view = _saved(f"hosts[{place}]", entry, inventory.hosts if inventory else {})
        if views.setdefault(view.host.name, view) is not view:
            message = f"hosts[{place}]: the host {view.host.name!r} is here twice"
            raise BadFleetError(message, fix="leave one of them out")
    return list(views.values())


def _saved(place: str, entry: object, known: Mapping[str, Host]) -> HostView:
    name = entry.get("name") if isinstance(entry, Mapping) else None
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise BadFleetError(f"{place}: this is not a host with its name: 1 to 63 of a-z, 0-9 and '-'")
    host = known.get(name, Host(name=name))
    try:
        reader = Reader(name, entry, "the entry")
        if reader.get("reached") is not True:
            stage = None if reader.get("stage") is None else reader.word("stage", [*Stage])
            return HostView(
                host=host,
                reached=False,
                stage=Stage(stage) if stage else None,
                error=reader.optional_text("error"),
                fix=reader.optional_text("fix"),
            )
        facts = facts_from_report(reader.get("report"))
        names = {reader.optional_text("python") or host.python, facts.python} - {None}
    except BadReplyError as error:
        raise BadFleetError(f"{place} ({name}): {error.reason}") from error
    except BadReportError as error:
        raise BadFleetError(f"{place} ({name}): {error}") from error
    return HostView(
        host=host,
        reached=True,
        facts=facts,
        pythons={python: facts for python in names if python is not None},
        domain=(facts.boot_id or name, host.lease_dir or ""),
    )


def reached(views: Collection[HostView]) -> dict[str, HostView]:
    """Return the views of the hosts that answered, by name."""
    return {view.host.name: view for view in views if view.reached}
