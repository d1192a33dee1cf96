"""Cancels that a host could not be told of: the store keeps them, and the next contact sends them, whoever makes it."""

from __future__ import annotations

import getpass
import socket
from typing import Final

from gpulayer.fleet.session import AgentError, Session
from gpulayer.placement.plan import KnownRun
from gpulayer.remote import states
from gpulayer.run.store import Store

WAITS: Final = "its cancel is kept, and sent when the host answers next"
SENT: Final = "its cancel, which was kept while the host did not answer, was sent now"


async def send(session: Session, run: str, *, grace: float | None, by: str) -> None:
    """Tell a host to cancel a run; the first cancel counts. HostError, and AgentError `unknown_run`."""
    await session.request("cancel", run=run, grace=grace, by=by)


def here() -> str:
    """Return who cancels: this user on this machine."""
    return f"{getpass.getuser()}@{socket.gethostname()}"


async def deliver(session: Session, store: Store) -> list[KnownRun]:
    """Send a host the cancels that are kept for it, and return the runs that it was told of. HostError.

    A run that the host does not know has not arrived there: where it was about to be launched its cancel stays, and
    keeps it from being launched; otherwise there is nothing left to cancel.
    """
    told: list[KnownRun] = []
    for kept in store.kept_cancels(session.name):
        try:
            await send(session, kept.run.run, grace=kept.grace, by=kept.by)
            told.append(kept.run)
        except AgentError as error:
            if error.code != "unknown_run":
                continue  # the host cannot do it now: it is kept for the next time
            if kept.run.status == states.LAUNCHING:
                continue
        store.forget_cancels([kept.run.run])
    return told
