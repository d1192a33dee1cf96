"""What answers to a launch mean: busy is waited for, a lock is asked of the same host again, the rest fails."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from gpulayer.fleet.session import AgentError, Reply, Session, Stream
from gpulayer.placement.plan import KnownRun
from gpulayer.remote import states
from gpulayer.run import launch
from gpulayer.run.channel import Channel
from gpulayer.run.events import Event, now
from gpulayer.run.follow import Links, Reporter
from gpulayer.run.launch import Busy, Launcher, Rejected, Unwanted
from gpulayer.run.store import Intent, Store

RUN = KnownRun(run="a-0123456789ab-a1", job="a", key="0123456789ab", attempt=1, host="alpha", status="launching")
SPEC: dict[str, Any] = {"run": RUN.run, "secrets": [], "tree": None, "gang": None}
STARTED = {"run": RUN.run, "job": "a", "key": RUN.key, "attempt": 1, "status": "running"}


class Host:
    """A host that gives these answers to a launch, one after the other; each is an error or the run's state."""

    name = "alpha"

    def __init__(self, *answers: dict[str, Any], meanwhile: Callable[[], None] = lambda: None) -> None:
        self.answers = list(answers)
        self.meanwhile = meanwhile
        self.cancelled: list[str] = []

    async def stream(self, op: str, _payload: bytes, **_fields: Any) -> Stream:
        assert op == "launch"
        answer = self.answers.pop(0)
        self.meanwhile()
        stream = Stream(cast("Session", self), 1)
        if "code" in answer:
            stream.fail(AgentError(self.name, {"error": answer}))
        else:
            stream.take(Reply({"ok": True, "new": True, "state": answer}, b""))
        return stream

    async def request(self, op: str, *, run: str, **_fields: Any) -> Reply:
        assert op == "cancel"
        self.cancelled.append(run)
        return Reply({"ok": True}, b"")


class Line:
    """A link to that host which is never lost."""

    def __init__(self, host: Host, patience: float) -> None:
        self.host, self.patience = host, patience

    async def insist_together(self, hosts: list[str], step: Callable[[list[Session]], Awaitable[Any]]) -> Any:
        assert hosts == [self.host.name]
        return await step([cast("Session", self.host)])


async def answer_to(host: Host, folder: Path, *, patience: float = 60, unwanted: bool = False) -> Any:
    with Store.open(folder) as store:
        store.take("p", [KnownRun(run=RUN.run, job="a", key=RUN.key, attempt=1, host="", status="queued")])
        store.intend([Intent(run=RUN, specs=(SPEC,))])
        if unwanted:
            store.keep_cancel(RUN.run, grace=None, by="me")
        reporter = Reporter(store=store, channel=Channel())
        links = cast("Links", Line(host, patience))
        return await Launcher(links=links, reporter=reporter, trees={}, environment={}).launch(RUN, [SPEC])


@pytest.mark.parametrize(
    ("error", "means"),
    [
        ({"code": "busy", "message": "m", "holder": "b-1-a1"}, Busy(host="alpha", reason="alpha is busy: b-1-a1")),
        ({"code": "busy", "message": "m", "holder": 7}, Busy(host="alpha", reason="alpha is busy")),
        (
            {"code": "memory", "message": "too little", "found": 5},
            Busy(host="alpha", reason="alpha: too little", free_memory=5),
        ),
        ({"code": "memory", "message": "too little"}, Rejected(reason="alpha: too little")),
        ({"code": "disk", "message": "too little", "found": 5}, Rejected(reason="alpha: too little")),
        ({"code": "conflict", "message": "another"}, Rejected(reason="alpha: another")),
    ],
)
async def test_refusals(tmp_path: Path, error: dict[str, Any], means: object) -> None:
    assert await answer_to(Host(error), tmp_path) == means


async def test_a_lock_is_asked_of_the_same_host_until_it_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(launch, "LOCKED", 0.0)
    host = Host({"code": "lock", "message": "m"}, {"code": "lock", "message": "m"}, STARTED)
    new, state = await answer_to(host, tmp_path)
    assert (new, state.run.status) == (True, "running")


async def test_a_lock_that_stays_is_no_failure_to_start(tmp_path: Path) -> None:
    with pytest.raises(AgentError) as caught:
        await answer_to(Host({"code": "lock", "message": "m"}), tmp_path, patience=0)
    assert caught.value.code == "lock"


async def test_a_run_whose_cancel_is_kept_is_not_sent(tmp_path: Path) -> None:
    assert await answer_to(Host(), tmp_path, unwanted=True) == Unwanted()


@pytest.mark.parametrize("settled", [False, True])
async def test_what_is_cancelled_while_hosts_hold_it_is_called_back(tmp_path: Path, settled: bool) -> None:
    def cancel() -> None:
        with Store.open(tmp_path) as store:
            store.keep_cancel(RUN.run, grace=None, by="another terminal")
            if settled:  # as a cancel does that has waited long for a host to know the run
                given_up = replace(RUN, status=states.LOST, reason="given up")
                store.record([(Event(event=states.LOST, at=now(), job="a", run=RUN.run, host="alpha"), given_up)])
                assert not store.is_unwanted(RUN.run)

    host = Host(STARTED, meanwhile=cancel)
    new, _ = await answer_to(host, tmp_path)
    assert (new, host.cancelled) == (True, [RUN.run])
    (tmp_path / "wanted").mkdir()
    wanted = Host(STARTED)
    await answer_to(wanted, tmp_path / "wanted")
    assert wanted.cancelled == []
