"""One link to one agent: answers, streams, silence, loss and reconnection; and agents that lie."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from gpulayer.errors import HostError, Stage
from gpulayer.fleet import session as session_module
from gpulayer.fleet.session import AgentError, Fleet, Session
from gpulayer.fleet.transport import ConnectOptions
from gpulayer.spec.inventory import Host, Inventory, TransportKind
from tests.fleet.conftest import Failure, open_hostile, run
from tests.host.agent_client import new_spec
from tests.sshd import SshdHost


@pytest.fixture
async def session(plain_host: SshdHost, connect_options: ConnectOptions) -> AsyncIterator[Session]:
    async with await Session.open(plain_host.host, Inventory(hosts={}), connect_options) as session:
        yield session


@pytest.mark.parametrize(
    "mode",
    ["huge", "negative", "exponent", "no-digits", "deep", "stranger", "number", "damaged", "twice", "noise-after"],
)
async def test_a_frame_that_may_not_be_ends_the_link(hostile: Host, failure: Failure, mode: str) -> None:
    error = await failure(dataclasses.replace(hostile, python=mode))
    assert error.stage is Stage.PROTOCOL


@pytest.mark.parametrize("mode", ["other-nonce", "drip"])
async def test_what_is_no_whole_frame_of_ours_is_no_answer(hostile: Host, failure: Failure, mode: str) -> None:
    error = await failure(dataclasses.replace(hostile, python=mode), start_timeout=1)
    assert error.stage in (Stage.SHELL, Stage.PROTOCOL)


async def test_an_answer_of_the_wrong_form_ends_the_link(hostile: Host, connect_options: ConnectOptions) -> None:
    async with await open_hostile(hostile, "answer-by-stream", connect_options) as session:
        with pytest.raises(HostError, match="answered by a stream"):
            await session.request("ping")


async def test_an_error_without_words_is_still_an_error(hostile: Host, connect_options: ConnectOptions) -> None:
    async with await open_hostile(hostile, "error-without-words", connect_options) as session:
        with pytest.raises(AgentError, match="an error without a message") as caught:
            await session.request("ping")
        assert caught.value.code == "unknown"


async def test_a_request_ends_at_its_limit_and_a_late_answer_is_harmless(
    hostile: Host, connect_options: ConnectOptions
) -> None:
    async with await open_hostile(hostile, "late", connect_options) as session:
        with pytest.raises(HostError, match=r"no answer to `status` within 0 s"):
            await session.request("status", timeout=0.1)
        assert (await session.request("ping")).header["ok"] is True


async def test_an_agent_that_leaves_ends_what_waits(hostile: Host, connect_options: ConnectOptions) -> None:
    async with await open_hostile(hostile, "leave", connect_options) as session:
        with pytest.raises(HostError, match="connection is lost"):
            await session.request("ping")
        assert (await session.closed).stage is Stage.CONNECT
        with pytest.raises(HostError, match="connection is lost"):
            await session.request("ping")


async def test_an_error_of_the_agent_has_its_code(session: Session) -> None:
    with pytest.raises(AgentError) as caught:
        await session.request("cancel", run="no-such-run", grace=None, by="test")
    assert caught.value.code == "unknown_run"


async def test_many_requests_at_once_get_their_own_answers(session: Session) -> None:
    wanted = [f"r{number}" for number in range(50)]
    replies = await asyncio.gather(*(session.request("status", runs=[run]) for run in wanted))
    assert [list(reply.header["states"]) for reply in replies] == [[run] for run in wanted]


async def test_what_an_agent_has_compiled_later_ones_need_not(
    sshd_host: Callable[..., SshdHost], connect_options: ConnectOptions
) -> None:
    host = sshd_host("compiler").host
    kept: set[tuple[str, int]] = set()
    for job in ("first", "second"):
        before = kept
        async with await Session.open(host, Inventory(hosts={}), connect_options) as session:
            await session.request("survey", project="-", after=None)
            assert (await run(session, ["true"], job=job))[0]["code"] == 0
            folder = Path(session.hello["state_root"]) / "code"
        kept = {(path.name, path.stat().st_mtime_ns) for path in folder.iterdir()}
        assert len(kept) == 1
    assert kept == before


async def test_a_stream_waits_for_its_reader_and_brings_every_byte(session: Session) -> None:
    size = 12 * 1024 * 1024  # three windows
    state, _ = await run(session, ["head", "-c", str(size), "/dev/zero"])
    stream = await session.stream("follow", run=state["run"], offset=0, tail=None)
    for _ in range(20):  # other requests are answered while nobody reads the stream
        await session.request("ping")
    received = 0
    async for reply in stream:
        if "off" in reply.header:
            assert reply.header["off"] == received
            received += len(reply.payload)
    assert received == size
    assert stream.last["state"]["status"] == "exited"


async def test_a_stream_can_be_stopped(session: Session) -> None:
    spec = new_spec(["sleep", "60"], job="sleeper")
    await session.request("launch", b"{}", spec=spec)
    stream = await session.stream("follow", run=spec["run"], offset=0, tail=None)
    async for reply in stream:
        assert reply.header["state"]
        await stream.stop()
    await session.request("cancel", run=spec["run"], grace=0, by="test")


async def test_silence_ends_the_link(
    sshd_host: Callable[..., SshdHost], connect_options: ConnectOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = sshd_host("silent")
    monkeypatch.setattr(session_module, "PING_INTERVAL", 0.2)
    monkeypatch.setattr(session_module, "SILENCE", 1.0)
    session = await Session.open(known.host, Inventory(hosts={}), connect_options)
    await asyncio.sleep(1.5)  # answered pings keep it open
    assert not session.closed.done()
    known.cut(signal.SIGSTOP)
    async with asyncio.timeout(10):
        assert "nothing came for" in (await session.closed).reason
    await session.close()
    known.cut(signal.SIGCONT)


async def test_a_lost_host_is_reached_again_and_asked_once_by_many(
    sshd_host: Callable[..., SshdHost], connect_options: ConnectOptions
) -> None:
    known = sshd_host("flaky")
    async with Fleet(Inventory(hosts={"flaky": known.host}), connect_options) as fleet:
        first = await fleet.session("flaky")
        assert await fleet.session("flaky") is first
        known.cut()
        assert (await first.closed).stage is Stage.CONNECT
        again = await asyncio.gather(*(fleet.session("flaky") for _ in range(5)))
        assert len({id(one) for one in again}) == 1
        assert again[0] is not first
        known.stop()
        await again[0].closed
        with pytest.raises(HostError):
            await fleet.session("flaky", deadline=0)
        waiting = asyncio.create_task(fleet.session("flaky", deadline=20))
        await asyncio.sleep(0.2)
        known.start()
        assert (await (await waiting).request("ping")).header["ok"] is True


async def test_a_fleet_says_for_each_host_why_it_is_not_reached(
    plain_host: SshdHost, connect_options: ConnectOptions, tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    hosts = {
        "good": plain_host.host,
        "off": dataclasses.replace(plain_host.host, name="off", port=1),
        "open": dataclasses.replace(plain_host.host, name="open", state_dir=str(tmp_path)),
        "here": Host(name="here", transport=TransportKind.LOCAL, state_dir=str(tmp_path)),
    }
    async with Fleet(Inventory(hosts=hosts), connect_options) as fleet, asyncio.timeout(30):
        found = await fleet.connect(["off", "good", "open", "here"])
    assert list(found) == ["off", "good", "open", "here"]
    assert isinstance(found["good"], Session)
    assert isinstance(found["off"], HostError)
    assert found["off"].stage is Stage.CONNECT
    for name in ("open", "here"):
        refused = found[name]
        assert isinstance(refused, HostError)
        assert str(refused).startswith(f"{name}: protocol: no folder for GPUlayer's state can be used")
        assert "state_dir" in (refused.fix or "")
