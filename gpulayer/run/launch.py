"""Launch runs: what a host is told, the shipped code that goes before, and the secrets that go beside."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from gpulayer.errors import HostError, UsageError
from gpulayer.fleet.session import AgentError, Session
from gpulayer.fleet.sync import sync
from gpulayer.fleet.tree import Tree
from gpulayer.placement.plan import HostView, KnownRun
from gpulayer.placement.rules import size
from gpulayer.remote import states
from gpulayer.remote.failpoints import failpoint
from gpulayer.run.cancels import here, send
from gpulayer.run.events import SYNCED, SYNCING, Event, now
from gpulayer.run.follow import Links, Reporter, at_once
from gpulayer.run.gang import Pending, is_address, launch_all
from gpulayer.run.replies import RunState, gang_state
from gpulayer.spec.identity import asked_python, gang_run
from gpulayer.spec.jobs import DistributedJob, JobSpec
from gpulayer.spec.support import Accelerator

MOST_SECRETS: Final = 1024 * 1024  # bytes of all secrets of a job as JSON: macOS gives a program no more in all
LONGEST_SECRET: Final = 128 * 1024  # bytes of NAME=value with its NUL: execve(2) of Linux takes no longer one
SPEC_SCHEMA: Final = "gpulayer.spec/1"
TOKEN_BYTES: Final = 32
SILENCE: Final = 60.0  # seconds without a word after which the nodes of a gang count each other as lost
LOCKED: Final = 1.0  # seconds until a launch is sent again that another launch of the same run is in the way of


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """The host's own word that it has no room now: nothing was written there, the run id is free.

    `free_memory` is the bytes that are left where memory lacks, None where a lease is taken.
    """

    host: str
    reason: str
    fix: str | None = None
    free_memory: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """The host cannot start this run at all; nothing was written there."""

    reason: str
    fix: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unwanted:
    """A cancel came first: nothing was sent."""


def check_secrets(jobs: Iterable[JobSpec], environment: Mapping[str, str] = os.environ) -> None:
    """UsageError that names every secret which is not set here or too long, before anything connects."""
    missing: dict[str, list[str]] = {}
    for job in jobs:
        values = {name: environment[name] for name in job.secrets if name in environment}
        for name in job.secrets:
            if name not in environment:
                missing.setdefault(name, []).append(job.name)
            elif (size := len(os.fsencode(f"{name}={values[name]}")) + 1) > LONGEST_SECRET:
                raise _too_long(f"the secret {name} of {job.name} has {size:,} bytes", LONGEST_SECRET)
        if (size := len(json.dumps(values))) > MOST_SECRETS:
            raise _too_long(f"the secrets of {job.name} have {size:,} bytes as JSON", MOST_SECRETS)
    if missing:
        names = ", ".join(f"{name} (of {', '.join(users)})" for name, users in sorted(missing.items()))
        raise UsageError(f"secrets are not set in the environment: {names}", fix=f"export {' '.join(sorted(missing))}")


def _too_long(what: str, most: int) -> UsageError:
    return UsageError(
        f"{what}, and an environment takes {most:,}", fix="put what is long into a file on the host, and name that"
    )


def spec_of(
    job: JobSpec,
    run: KnownRun,
    *,
    project: str,
    view: HostView,
    accelerator: Accelerator,
    peers: Sequence[str],
    tree: str | None,
    python: str | None,
) -> dict[str, Any]:
    """Return the spec of a run on one host (docs/protocol.md). It holds the names of secrets, never a value.

    `peers` are the hosts of its gang in node order.
    """
    facts = view.seen_by(asked_python(job))
    devices = {device.id: device for device in facts.devices} if facts else {}
    select: dict[str, list[str]] = {}
    for device in run.devices:
        for name, value in devices[device].select_env.items():
            select.setdefault(name, []).append(value)
    cpu = accelerator is Accelerator.CPU
    return {
        "schema": SPEC_SCHEMA,
        "run": run.run,
        "project": project,
        "job": run.job,
        "key": run.key,
        "attempt": run.attempt,
        "host": view.host.name,
        "accelerator": accelerator.value,
        "devices": list(run.devices),
        "share": 1,
        "slots": view.slots if cpu else None,
        "command": job.command if isinstance(job.command, str) else list(job.command),
        "env": dict(job.env),
        "select_env": {name: _joined(values) for name, values in select.items()},
        "secrets": list(job.secrets),
        "python": job.python or python,
        "tree": tree,
        "setup": job.setup,
        "outputs": list(job.outputs),
        "timeout": job.timeout,
        "grace": job.grace,
        "memory_bytes": _bytes(job.resources.memory_gb),
        "disk_bytes": _bytes(job.resources.disk_gb),
        "gang": _gang(job, run, view, accelerator, peers) if isinstance(job, DistributedJob) else None,
    }


def _gang(
    job: DistributedJob, run: KnownRun, view: HostView, accelerator: Accelerator, peers: Sequence[str]
) -> dict[str, Any]:  # fmt: skip
    """Return what a node is told of its gang; `endpoint`, the way to its first node, is known once that is held."""
    if run.node is None:
        raise ValueError(f"{run.run} is no node's run")
    private = view.host.private_address
    return {
        "run": gang_run(run.run, run.node),
        "node": run.node,
        "nodes": job.distributed.nodes,
        "processes": job.processes,
        "backend": job.backend_on(accelerator).value,
        "peers": list(peers),
        "address": private if private and is_address(private) else None,
        "endpoint": None,
        "silence": SILENCE,
    }


def _joined(values: list[str]) -> str:
    """Join what several devices set: a list of ids grows, an order that all agree on stays one word."""
    return ",".join(dict.fromkeys(values))


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else size(gib)


@dataclass(slots=True, kw_only=True)
class Launcher:
    """Sends launches, each with its code before it; code travels once a host and tree."""

    links: Links
    reporter: Reporter
    trees: Mapping[str, Tree]
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False)  # it has secrets
    _synced: dict[tuple[str, str], asyncio.Task[None]] = field(default_factory=dict)

    async def launch(
        self, run: KnownRun, specs: Sequence[Mapping[str, Any]]
    ) -> tuple[bool, RunState] | Busy | Rejected | Unwanted:
        """Return whether the run is new there and its state; `specs` are those of its parts.

        HostError where a host is given up, and AgentError `lock` where another launch of this run does not come to an
        end there: nobody knows then. Sending it again is safe: a host starts a run id at most once.
        """
        sent = False

        async def attempt(sessions: Sequence[Session]) -> tuple[bool, RunState] | Unwanted:
            nonlocal sent
            if not sent and self._is_unwanted(run):
                return Unwanted()
            sent = True  # from here on it may have arrived, whatever the link does
            told = await self._send(sessions, run, specs)
            if self._is_unwanted(run):
                await self._call_back(sessions, run)
            return told

        try:
            await at_once(self._ship(spec["host"], spec["tree"]) for spec in specs if spec["tree"] is not None)
            return await self.links.insist_together([part.host for part in run.parts], attempt)
        except AgentError as error:
            if error.code == "lock":
                raise
            return _refused(error)

    def _is_unwanted(self, run: KnownRun) -> bool:
        """Tell whether another process has cancelled what we launch: it is kept, or a person's word has settled it."""
        store = self.reporter.store
        known = store.run(run.run)
        ended = known is not None and known.status in states.FINAL
        return ended or any(map(store.is_unwanted, {run.run, *(part.run for part in run.parts)}))

    async def _call_back(self, sessions: Sequence[Session], run: KnownRun) -> None:
        """Cancel what the hosts held, and so did not know yet, when its cancel came. HostError."""
        for session, part in zip(sessions, run.parts, strict=True):
            try:
                await send(session, part.run, grace=None, by=here())
            except AgentError as error:
                if error.code != "unknown_run":
                    raise

    async def _send(
        self, sessions: Sequence[Session], run: KnownRun, specs: Sequence[Mapping[str, Any]]
    ) -> tuple[bool, RunState]:
        """Send a launch. Where another of the same run is under way only this host can tell its end: ask again."""
        give_up = time.monotonic() + self.links.patience
        failpoint("launch-due")
        while True:
            try:
                begin = functools.partial(self._begin, secrets.token_hex(TOKEN_BYTES))
                begun = await launch_all(sessions, specs, begin)
                break
            except AgentError as error:
                if error.code != "lock" or time.monotonic() >= give_up:
                    raise
                await asyncio.sleep(LOCKED)
        failpoint("launch-answered")
        told = [state for _, state in begun]
        return any(new for new, _ in begun), gang_state(told) if run.members else told[0]

    async def _begin(self, token: str, session: Session, spec: Mapping[str, Any]) -> Pending:
        """Send a part of a launch, and once more where its code was cleaned away between sync and launch.

        `token` is what the nodes of a gang know each other by, and is kept nowhere.
        """
        values = {name: self.environment[name] for name in spec["secrets"]}
        payload = json.dumps({"secrets": values, "token": token if spec["gang"] else None}).encode()
        for last in (False, True):
            pending = Pending(session, spec["run"], await session.stream("launch", payload, spec=spec))
            try:
                await pending.answer()
                failpoint("part-held")
            except AgentError as error:
                if error.code != "tree" or last:
                    raise
                await sync(session, self.trees[spec["tree"]], thorough=True)
            except asyncio.CancelledError:
                await pending.stream.stop()
                raise
            else:
                break
        return pending

    async def _ship(self, host: str, tree: str) -> None:
        """Bring a tree to a host. All runs that need it there wait for one transfer; a failed one is tried again."""
        task = self._synced.get((host, tree))
        if task is None:
            task = self._synced[host, tree] = asyncio.create_task(self._sync(host, self.trees[tree]))
        try:
            await asyncio.shield(task)
        except (HostError, AgentError):
            self._synced.pop((host, tree), None)
            raise

    async def _sync(self, host: str, tree: Tree) -> None:
        progress = self.reporter.progress(SYNCING, host)
        sent = await self.links.insist(host, lambda session: sync(session, tree, progress))
        self.reporter.say(
            Event(
                event=SYNCED, at=now(), host=host,
                detail={
                    "files": tree.files, "bytes": tree.bytes, "sent_files": sent.files, "sent_bytes": sent.bytes,
                },
            )
        )  # fmt: skip

    async def close(self) -> None:
        """End transfers that nobody waits for any more."""
        for task in self._synced.values():
            task.cancel()
        await asyncio.gather(*self._synced.values(), return_exceptions=True)


def _refused(error: AgentError) -> Busy | Rejected:
    """Return what a host's refusal means: busy is what comes free when others have ended."""
    if error.code == "busy":
        holder = error.error.get("holder")
        words = f": {holder}" if isinstance(holder, str) else ""
        return Busy(host=error.host, reason=f"{error.host} is busy{words}")
    free = error.error.get("found")
    if error.code == "memory" and isinstance(free, int):
        return Busy(host=error.host, reason=error.message, fix=error.fix, free_memory=free)
    named = error.code == "peer"  # both ends
    return Rejected(reason=error.reason if named else error.message, fix=error.fix)
