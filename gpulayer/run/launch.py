"""Launch runs: what a host is told, the shipped code that goes before, and the secrets that go beside."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from gpulayer.errors import HostError, UsageError
from gpulayer.fleet.session import AgentError, Reply, Session
from gpulayer.fleet.sync import sync
from gpulayer.fleet.tree import Tree
from gpulayer.placement.plan import HostView, KnownRun, Placement
from gpulayer.placement.rules import size
from gpulayer.remote.failpoints import failpoint
from gpulayer.run.events import SYNCED, SYNCING, Event, now
from gpulayer.run.follow import Links, Reporter
from gpulayer.run.replies import Reader, RunState, run_state
from gpulayer.spec.identity import asked_python
from gpulayer.spec.jobs import JobSpec
from gpulayer.spec.support import Accelerator

SPEC_SCHEMA: Final = "gpulayer.spec/1"
LAUNCH_LIMIT: Final = 60.0  # seconds
LOCKED: Final = 1.0  # seconds until a launch is sent again that another launch of the same run is in the way of


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """The host's own word that it has no room now: nothing was written there, the run id is free.

    `free_memory` is the bytes that are left where memory lacks, None where a lease is taken.
    """

    reason: str
    free_memory: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """The host cannot start this run at all; nothing was written there."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unwanted:
    """A cancel came first: nothing was sent."""


def check_secrets(jobs: Iterable[JobSpec], environment: Mapping[str, str] = os.environ) -> None:
    """UsageError that names every secret which is not set here, before anything connects."""
    missing: dict[str, list[str]] = {}
    for job in jobs:
        for name in job.secrets:
            if name not in environment:
                missing.setdefault(name, []).append(job.name)
    if missing:
        names = ", ".join(f"{name} (of {', '.join(users)})" for name, users in sorted(missing.items()))
        raise UsageError(f"secrets are not set in the environment: {names}", fix=f"export {' '.join(sorted(missing))}")


def spec_of(
    job: JobSpec,
    run: KnownRun,
    *,
    project: str,
    view: HostView,
    accelerator: Accelerator,
    placement: Placement,
    tree: str | None,
    python: str | None,
) -> dict[str, Any]:
    """Return the spec of a run (docs/protocol.md). It holds the names of secrets, never a value."""
    facts = view.seen_by(asked_python(job))
    devices = {device.id: device for device in facts.devices} if facts else {}
    select: dict[str, list[str]] = {}
    for device in placement.devices:
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
        "devices": list(placement.devices),
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
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    _synced: dict[tuple[str, str], asyncio.Task[None]] = field(default_factory=dict)

    async def launch(
        self, run: KnownRun, spec: Mapping[str, Any]
    ) -> tuple[bool, RunState] | Busy | Rejected | Unwanted:
        """Return whether the run is new there and its state.

        HostError where the host is given up, and AgentError `lock` where another launch of this run does not come to an
        end there: nobody knows then. Sending it again is safe: a host starts a run id at most once.
        """
        secrets = json.dumps({name: self.environment[name] for name in spec["secrets"]}).encode()
        sent = False

        async def send(session: Session) -> tuple[bool, RunState] | Unwanted:
            nonlocal sent
            if not sent and self.reporter.store.is_unwanted(run.run):
                return Unwanted()
            sent = True  # from here on it may have arrived, whatever the link does
            return await self._send(session, run, spec, secrets)

        try:
            if spec["tree"] is not None:
                await self._ship(run.host, spec["tree"])
            return await self.links.insist(run.host, send)
        except AgentError as error:
            if error.code == "lock":
                raise
            return _refused(run.host, error)

    async def _send(
        self, session: Session, run: KnownRun, spec: Mapping[str, Any], secrets: bytes
    ) -> tuple[bool, RunState]:
        """Send a launch. Where another of the same run is under way only this host can tell its end: ask again."""
        give_up = time.monotonic() + self.links.patience
        failpoint("launch-due")
        while True:
            try:
                reply = await self._request(session, spec, secrets)
                break
            except AgentError as error:
                if error.code != "lock" or time.monotonic() >= give_up:
                    raise
                await asyncio.sleep(LOCKED)
        failpoint("launch-answered")
        reader = Reader(run.host, reply.header)
        state = run_state(run.host, reader.get("state"))
        if state.run.run != run.run:
            raise reader.bad("state")
        return reader.get("new") is True, state

    async def _request(self, session: Session, spec: Mapping[str, Any], secrets: bytes) -> Reply:
        try:
            return await session.request("launch", secrets, timeout=LAUNCH_LIMIT, spec=spec)
        except AgentError as error:
            if error.code != "tree":
                raise
        await sync(session, self.trees[spec["tree"]], thorough=True)  # cleaned away between sync and launch
        return await session.request("launch", secrets, timeout=LAUNCH_LIMIT, spec=spec)

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


def _refused(host: str, error: AgentError) -> Busy | Rejected:
    """Return what a host's refusal means: busy is what comes free when others have ended."""
    if error.code == "busy":
        holder = error.error.get("holder")
        return Busy(reason=f"{host} is busy" + (f": {holder}" if isinstance(holder, str) else ""))
    free = error.error.get("found")
    if error.code == "memory" and isinstance(free, int):
        return Busy(reason=error.message, free_memory=free)
    return Rejected(reason=error.message)
