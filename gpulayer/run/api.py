"""What the command line and the SDK call. Each call opens its own connections, or uses a fleet that is open already."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

from gpulayer.errors import UsageError
from gpulayer.fleet.session import Fleet
from gpulayer.fleet.transport import ConnectOptions
from gpulayer.placement.plan import HostView, KnownRun, Plan
from gpulayer.run import afterwards, garbage, planning
from gpulayer.run.afterwards import Afterwards, run_of, runs_to_cancel
from gpulayer.run.apply import Scene, carry_out, go_on, stream
from gpulayer.run.events import Event
from gpulayer.run.follow import PATIENCE, Reporter
from gpulayer.run.garbage import Garbage
from gpulayer.run.store import Store
from gpulayer.run.survey import Question, Surveyed, survey, views_from_fleet
from gpulayer.spec.inventory import Host, Inventory
from gpulayer.spec.jobs import JobSet


@asynccontextmanager
async def connected(
    inventory: Inventory, options: ConnectOptions | None = None, fleet: Fleet | None = None
) -> AsyncIterator[Fleet]:
    """Give the fleet that is open already, else one that is closed at the end."""
    if fleet is not None:
        yield fleet
        return
    async with Fleet(inventory, options or ConnectOptions()) as opened:
        yield opened


async def probe(
    inventory: Inventory,
    hosts: Sequence[str] | None = None,
    *,
    frameworks: Sequence[str] = planning.FRAMEWORKS,
    python: str | None = None,
    fresh: bool = False,
    deep: bool = False,
    options: ConnectOptions | None = None,
    fleet: Fleet | None = None,
) -> list[Surveyed]:
    """Return what the hosts are, in the inventory's order; one that fails is not reached, with the stage and why.

    The frameworks are asked of `python` on the hosts, None: of the interpreter that the inventory names. `deep` tries
    operators and dtypes on the first device of each framework, which later plans go by.

    UsageError where `hosts` names one that is not in the inventory.
    """
    asked = _named(inventory, hosts)
    question = Question(frameworks=tuple(frameworks), python=python, fresh=fresh, deep=deep)
    async with connected(inventory, options, fleet) as reached:
        return await survey(reached, asked, question)


async def holders(
    inventory: Inventory,
    project: str = "-",
    *,
    hosts: Sequence[str] | None = None,
    fresh: bool = False,
    options: ConnectOptions | None = None,
    fleet: Fleet | None = None,
) -> list[HostView]:
    """Return the hosts with what holds each device, of whatever project; their `runs` are those of `project`.

    UsageError where `hosts` names one that is not in the inventory.
    """
    asked = _named(inventory, hosts)
    async with connected(inventory, options, fleet) as reached:
        answers = await survey(reached, asked, Question(project=project, frameworks=(), fresh=fresh))
    return [answer.view for answer in answers]


async def gc(
    inventory: Inventory,
    hosts: Sequence[str] | None = None,
    *,
    older_than: int = 30 * 86_400,
    dry: bool = True,
    options: ConnectOptions | None = None,
    fleet: Fleet | None = None,
) -> list[Garbage]:
    """Return what runs that ended more than `older_than` seconds ago have left on the hosts, of whatever project.

    With `dry=False` it is removed. What lives stays, and the end of each run stays known, so that none runs again.
    """
    asked = [host.name for host in _named(inventory, hosts)]
    async with connected(inventory, options, fleet) as reached:
        return await garbage.collect(reached, asked, older_than=older_than, dry=dry)


async def plan(
    jobs: JobSet,
    inventory: Inventory,
    *,
    fresh: bool = False,
    retry_failed: bool = False,
    options: ConnectOptions | None = None,
    fleet: Fleet | None = None,
) -> Plan:
    """Decide what would happen with these jobs on this fleet now. Starts nothing, saves nothing."""
    async with connected(inventory, options, fleet) as reached:
        return await planning.make(jobs, inventory, reached, fresh=fresh, retry_failed=retry_failed)


async def plan_against(
    jobs: JobSet, inventory: Inventory | None, document: object, *, retry_failed: bool = False
) -> Plan:
    """Plan against a saved `gpulayer.fleet/1` document instead of asking hosts; such a plan cannot be applied.

    The hosts are the document's; an inventory adds labels, drain and limits by name.
    """
    views = views_from_fleet(document, inventory)
    stand_in = Inventory(
        hosts={view.host.name: view.host for view in views}, path=inventory.path if inventory else None
    )
    code = await planning.code_of(jobs, stand_in)
    return planning.decide(jobs, stand_in, views, code, retry_failed=retry_failed, applicable=False)


def apply(
    plan: Plan,
    jobs: JobSet,
    inventory: Inventory,
    *,
    partial: bool = False,
    detach: bool = False,
    patience: float = PATIENCE,
    options: ConnectOptions | None = None,
    fleet: Fleet | None = None,
) -> AsyncGenerator[Event, None]:
    """Carry out a plan and yield what happens; the last event is `summary`, whose `exit_code` is the contract's.

    Where a job cannot be placed, or a host that is needed does not answer, nothing is started unless `partial`: the
    summary alone comes. `detach` ends once all that can start are launched. Closing the iterator, or cancelling the
    task that reads it, detaches: what was launched goes on. A host that is silent for `patience` seconds is given up:
    its runs are `unknown`. Raises UsageError (a secret is not set, the plan is not applicable) and StalePlanError.
    """

    async def act(store: Store, reached: Fleet, reporter: Reporter) -> None:
        scene = Scene(
            jobs=jobs, inventory=inventory, fleet=reached, store=store, reporter=reporter,
            detach=detach, patience=patience,
        )  # fmt: skip
        await carry_out(scene, plan, partial=partial)

    return _events(jobs.folder, inventory, options, fleet, act)


def attach(
    jobs: JobSet,
    inventory: Inventory,
    plan: Plan | None,
    *,
    detach: bool = False,
    patience: float = PATIENCE,
    options: ConnectOptions | None = None,
    fleet: Fleet | None = None,
) -> AsyncGenerator[Event, None]:
    """Follow all that runs of this project, get what has ended since, and go on with the queue of the saved plan.

    Events and their end as of `apply`. Where documents or code have changed since the plan was made, what runs is
    followed, nothing is started, and StalePlanError is raised after the summary.
    """

    async def act(store: Store, reached: Fleet, reporter: Reporter) -> None:
        scene = Scene(
            jobs=jobs, inventory=inventory, fleet=reached, store=store, reporter=reporter,
            detach=detach, patience=patience,
        )  # fmt: skip
        await go_on(scene, plan)

    return _events(jobs.folder, inventory, options, fleet, act)


async def status(
    folder: Path,
    inventory: Inventory,
    *,
    project: str | None = None,
    options: ConnectOptions | None = None,
    fleet: Fleet | None = None,
) -> list[KnownRun]:
    """Return the runs that were applied here, oldest first; hosts are asked only for those whose end is not known."""
    with Store.open(folder) as store:
        async with connected(inventory, options, fleet) as reached:
            return await afterwards.status(store, reached, project)


def cancel(
    folder: Path,
    inventory: Inventory,
    jobs: Sequence[str] | None,
    *,
    project: str | None = None,
    grace: float | None = None,
    patience: float = 0.0,
    options: ConnectOptions | None = None,
    fleet: Fleet | None = None,
) -> AsyncGenerator[Event, None]:
    """Drop jobs from the queue and cancel those that run; ends, with a summary, when each end is verified.

    `jobs` None means all of `project` that have not ended; `grace` is seconds between TERM and KILL, None the job's.
    """

    async def act(store: Store, reached: Fleet, reporter: Reporter) -> None:
        runs = await runs_to_cancel(store, reached, jobs, project)
        await Afterwards(store, reached, reporter, patience).cancel(runs, grace=grace)

    return _events(folder, inventory, options, fleet, act)


def logs(
    folder: Path,
    inventory: Inventory,
    job: str,
    *,
    follow: bool = False,
    rank: int | None = None,
    project: str | None = None,
    patience: float = PATIENCE,
    options: ConnectOptions | None = None,
    fleet: Fleet | None = None,
) -> AsyncGenerator[Event, None]:
    """Yield a run's output from its beginning: of a job's latest run, or the run that is named; `follow` to its end.

    Of a distributed job that is the output of all ranks, or of `rank` alone. The last event is the run's status. A
    silent host is waited for only with `follow`.
    """

    async def act(store: Store, reached: Fleet, reporter: Reporter) -> None:
        run = await run_of(store, reached, job, project)
        wait = patience if follow else 0.0
        await Afterwards(store, reached, reporter, wait).logs(run, follow=follow, rank=rank)

    return _events(folder, inventory, options, fleet, act)


def fetch(
    folder: Path,
    inventory: Inventory,
    job: str,
    *,
    project: str | None = None,
    patience: float = 0.0,
    options: ConnectOptions | None = None,
    fleet: Fleet | None = None,
) -> AsyncGenerator[Event, None]:
    """Fetch a run's outputs as they are now; yields `fetched`."""

    async def act(store: Store, reached: Fleet, reporter: Reporter) -> None:
        run = await run_of(store, reached, job, project)
        await Afterwards(store, reached, reporter, patience).fetch(run)

    return _events(folder, inventory, options, fleet, act)


async def _events(
    folder: Path,
    inventory: Inventory,
    options: ConnectOptions | None,
    fleet: Fleet | None,
    act: Callable[[Store, Fleet, Reporter], Awaitable[None]],
) -> AsyncGenerator[Event, None]:
    """Yield what `act` reports, with the folder's store and a fleet that are open for as long as it takes."""
    with Store.open(folder) as store:
        async with connected(inventory, options, fleet) as reached:
            events = stream(store, lambda reporter: act(store, reached, reporter))
            async with aclosing(events):
                async for event in events:
                    yield event


def _named(inventory: Inventory, hosts: Sequence[str] | None) -> list[Host]:
    if hosts is None:
        return list(inventory.hosts.values())
    for name in hosts:
        if name not in inventory.hosts:
            raise UsageError(f"there is no host {name!r} in the inventory", fix=f"one of {', '.join(inventory.hosts)}")
    return [inventory.hosts[name] for name in hosts]
