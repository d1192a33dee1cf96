"""Links that are cut, silent, slow or half open: the job does not notice, and its log comes whole."""

from __future__ import annotations

import random
import shutil
import signal
import socket
from collections.abc import Callable
from dataclasses import replace

import pytest

from gpulayer.fleet import session as sessions
from gpulayer.run import api
from gpulayer.run.events import Event
from tests.faults.hosts import PoweredHost, until
from tests.faults.launches import Launches
from tests.faults.oracle import journaled
from tests.faults.proxy import Proxy
from tests.faults.scene import Scene, applied
from tests.run.project import output, summary
from tests.sshd import ADDRESS, keygen

TALKS = "i=0; until test -e %s/gate; do i=$((i+1)); echo line $i; sleep 0.02; done"


async def through(scene: Scene, hurt: Callable[[PoweredHost, Proxy], None]) -> list[Event]:
    """Apply one job behind a proxy, do something to its link while it streams, and return all events."""
    host = scene.host("a")
    proxy = await scene.proxy("a")
    project = scene.project()
    project.write({"a": {"command": journaled(TALKS % project.folder)}})
    seen: list[Event] = []
    hurting = False
    async for event in applied(project):
        seen.append(event)
        if event.event == "output" and not hurting:
            hurting = True
            hurt(host, proxy)
        elif event.event == "link_lost":
            host.cut(signal.SIGKILL)  # what was stopped would hold its agent for a minute
            proxy.recover()
        elif event.event == "link_back":
            (project.folder / "gate").touch()
    assert summary(seen) == (0, {"succeeded": 1})
    whole = output(seen, "a")
    assert whole == project.local_log(next(iter(project.runs())))
    assert [event.event for event in seen if event.event.startswith("link_")] == ["link_lost", "link_back"]
    assert sum(scene.check().starts.values()) == 1
    return seen


HURTS: dict[str, Callable[[PoweredHost, Proxy], None]] = {
    "the connection is reset": lambda _, proxy: proxy.cut(),
    "sshd's session is killed": lambda host, _: host.cut(),
    "the server's side is closed": lambda _, proxy: proxy.half_close(up=False),
    "our side is closed": lambda _, proxy: proxy.half_close(up=True),
}


@pytest.mark.parametrize("name", HURTS)
async def test_a_stream_resumes_where_it_was_cut(scene: Scene, name: str) -> None:
    """F08, F15."""
    await through(scene, HURTS[name])


SILENCES: dict[str, Callable[[PoweredHost, Proxy], None]] = {
    "sshd's session is stopped": lambda host, _: host.cut(signal.SIGSTOP),
    "the network is a black hole": lambda _, proxy: proxy.black_hole(),
}


@pytest.mark.parametrize("name", SILENCES)
async def test_silence_is_noticed_and_mended(scene: Scene, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """F09, F12, with a minute's silence shortened to a second; `make faults` waits for the minute."""
    monkeypatch.setattr(sessions, "PING_INTERVAL", 0.2)
    monkeypatch.setattr(sessions, "SILENCE", 1.0)
    await through(scene, SILENCES[name])


async def test_a_slow_link_is_no_lost_link(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """F16: what the link holds back counts as a sign of life once it comes; the keepalive fires at no time."""
    monkeypatch.setattr(sessions, "PING_INTERVAL", 0.2)
    monkeypatch.setattr(sessions, "SILENCE", 3.0)
    scene.host("a")
    proxy = await scene.proxy("a")
    project = scene.project()
    project.write({"a": {"command": journaled("dd if=/dev/zero bs=1024 count=60 2>/dev/null")}})
    plan = await project.plan()
    proxy.delay, proxy.rate = 0.3, 20_000
    events = await project.apply(plan)
    assert summary(events) == (0, {"succeeded": 1})
    assert output(events, "a") == bytes(61440)
    assert not [event for event in events if event.event == "link_lost"]


async def test_a_cut_at_any_byte_of_a_launch_starts_it_at_most_once(scene: Scene) -> None:
    """F14: a sample of the bytes of both directions; `make faults` takes each one."""
    launches = await Launches.on(scene)
    total = await launches.measure()
    dice = random.Random(14)  # noqa: S311  # no secret
    for up in (True, False):
        for count in sorted(dice.sample(range(total[up]), 6)):
            await launches.cut_at(up=up, count=count)
    await launches.close()
    journal = scene.check()
    assert len(journal.starts) == launches.number
    assert set(journal.ends) == set(journal.starts)


async def test_what_cannot_be_reached_is_told_apart_and_the_rest_goes_on(scene: Scene) -> None:
    """F18."""
    good = scene.host("good")
    with socket.create_server((ADDRESS, 0)) as reserved:
        closed = reserved.getsockname()[1]
    with socket.create_server((ADDRESS, 0)) as silent:
        project = scene.project()
        for name, entry in {
            "unknown": {"address": "no-such-name.invalid"},
            "refused": {"port": closed},
            "silent": {"port": silent.getsockname()[1]},
        }.items():
            project.hosts[name] = good
            scene.extra[name] = entry
        project.options = replace(project.options, login_timeout=1.0)
        project.write({"a": {"command": journaled()}})
        plan = await project.plan()
        surveyed = await api.probe(project.inventory, frameworks=(), fleet=project.fleet)
        found = {answer.view.host.name: answer.view.stage for answer in surveyed}
        assert summary(await project.apply(plan)) == (0, {"succeeded": 1})
    assert found == {"good": None, "unknown": "resolve", "refused": "connect", "silent": "connect"}
    scene.check()


async def test_a_swapped_host_key_is_a_hard_stop(scene: Scene) -> None:
    """F19: what runs there is unknown until the host is itself again, and is not run elsewhere."""
    host, other = scene.host("a"), scene.host("b")
    project = scene.project()
    project.write({"a": {"command": journaled(TALKS % project.folder), "where": {"hosts": ["a"]}}})
    plan = await project.plan()
    assert summary(await project.apply(plan, detach=True)) == (0, {"running": 1})
    await until((host.home / "journal").exists)
    await scene.disconnect()
    host.stop()
    true_key = host.host_key.read_bytes()
    shutil.copy(keygen(host.home / "another"), host.host_key)
    host.start()
    (run,) = await project.status()
    assert run.status == "unknown"
    assert "key" in (run.reason or "")
    project.write({"a": {"command": journaled(TALKS % project.folder)}})  # now the other host would do
    assert summary(await project.apply())[0] == 4
    host.stop()
    host.host_key.write_bytes(true_key)
    host.start()
    (project.folder / "gate").touch()
    assert summary(await project.apply())[0] == 0
    assert not (other.home / "journal").exists()
    assert sum(scene.check().starts.values()) == 1


async def test_whatever_is_written_arrives_byte_for_byte(scene: Scene) -> None:
    """F26: a long line, no last newline, nothing, only NULs, no UTF-8."""
    writes = {
        "long": "head -c 1048576 /dev/zero | tr '\\0' x",
        "ragged": "printf 'no newline'",
        "silent": ":",
        "nuls": "head -c 4096 /dev/zero",
        "wild": "printf '\\377\\376\\300\\033]0;x\\a\\r\\n'",
    }
    scene.host("a")
    project = scene.project()
    project.write({name: {"command": journaled(body)} for name, body in writes.items()})
    events = await project.apply()
    assert summary(events) == (0, {"succeeded": 5})
    assert len(output(events, "long")) == 1048576
    assert output(events, "ragged") == b"no newline"
    assert output(events, "silent") == b""
    assert output(events, "nuls") == bytes(4096)
    assert output(events, "wild") == b"\xff\xfe\xc0\x1b]0;x\a\r\n"
    scene.check()
