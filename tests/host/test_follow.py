from __future__ import annotations

import hashlib
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpulayer.remote.follow import follow
from gpulayer.remote.runs import Run
from gpulayer.remote.watch import Watches
from tests.host.agent_client import AgentClient, AgentError, new_spec

# What an agent does first: it looks a minute after it was told, is never told, is not told of the log.
SELDOM = "from gpulayer.remote import follow; follow._SETTLE = 60.0; "
BLIND = "from gpulayer.remote.watch import Watches; Watches.watch = lambda *_: None; "
NO_MORE = "from gpulayer.remote.watch import Watch; Watch.add = lambda *_: False; "

linux = pytest.mark.linux("inotify")


def tail_of(data: bytes) -> dict[str, Any]:
    last = data[-4096:]
    return {"bytes": len(last), "sha256": hashlib.sha256(last).hexdigest()}


@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 5000, b"\xff\xfe\xc2\x9b no newline", b"x" * 1_000_000, os.urandom(3_000_000), b"@@GL1 \n" * 1000],
    ids=["nothing", "nuls", "not utf-8", "one long line", "more than a window", "looks like a frame"],
)
def test_the_log_comes_byte_for_byte(agent: AgentClient, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "content").write_bytes(content)
    spec = new_spec(f"cat {tmp_path}/content")
    agent.launch(spec)
    state, log = agent.follow(spec["run"])
    assert log == content
    assert state["log_size"] == len(content)


def test_a_follower_resumes_where_it_was_cut_off(agent: AgentClient, agents: Callable[..., AgentClient]) -> None:
    spec = new_spec("for i in $(seq 300); do echo line $i; sleep 0.001; done")
    agent.launch(spec)
    kept = b""
    for header, payload in agent.frames(agent.send("follow", run=spec["run"], offset=0, tail=None)):
        assert "error" not in header
        kept += payload
        if len(kept) > 500:
            break
    agent.process.kill()
    second = agents()
    state, rest = second.follow(spec["run"], len(kept), tail_of(kept))
    assert state["code"] == 0
    assert kept + rest == b"".join(b"line %d\n" % number for number in range(1, 301))


def test_a_log_that_is_not_the_one_of_before_is_never_spliced(agent: AgentClient) -> None:
    spec = new_spec("echo 0123456789")
    agent.launch(spec)
    _, log = agent.follow(spec["run"])
    assert agent.follow(spec["run"], len(log), tail_of(log))[1] == b""
    assert agent.follow(spec["run"], 4, tail_of(b"0123"))[1] == b"456789\n"
    for offset, tail in (
        (4, tail_of(b"0124")),
        (5, tail_of(b"0123")),
        (99, None),
        (99, tail_of(log)),
        (2, tail_of(b"0123")),
    ):
        with pytest.raises(AgentError) as caught:
            agent.follow(spec["run"], offset, tail)
        assert caught.value.code == "log_replaced"


def test_an_unknown_run_is_an_error(agent: AgentClient) -> None:
    assert agent.status("nobody-a1") is None
    for op, fields in (("follow", {"offset": 0}), ("cancel", {"by": "me"}), ("fetch", {"patterns": []})):
        with pytest.raises(AgentError) as caught:
            agent.ask(op, run="nobody-a1", **fields)
        assert caught.value.code == "unknown_run"


def test_a_run_whose_folder_somebody_removes_is_known_no_more(agent: AgentClient) -> None:
    spec = new_spec("echo begun; exec sleep 1000")
    agent.launch(spec)
    frames = agent.frames(agent.send("follow", run=spec["run"], offset=0, tail=None))
    while next(frames)[1] != b"begun\n":
        pass
    record = agent.record(spec["run"])
    shutil.rmtree(agent.run_folder(spec["run"]))
    for pid, _ in (record["supervisor"], record["leader"]):
        os.kill(pid, signal.SIGKILL)
    *_, (header, _) = frames
    assert header["error"]["code"] == "unknown_run"


def typical_delay(agent: AgentClient) -> float:
    """The median of twenty delays between a line's writing and its arrival, in seconds."""
    show = "import time\nfor _ in range(20): print(time.monotonic(), flush=True); time.sleep(0.02)"
    spec = new_spec(["python", "-c", show])
    agent.launch(spec)
    late = []
    for header, payload in agent.frames(agent.send("follow", run=spec["run"], offset=0, tail=None)):
        now = time.monotonic()
        late += [now - float(line) for line in payload.split()]
        assert "error" not in header
    assert len(late) == 20
    return sorted(late)[10]


@pytest.mark.parametrize("prelude", ["", BLIND], ids=["told", "looking"])
def test_output_arrives_soon_after_it_is_written(agents: Callable[..., AgentClient], prelude: str) -> None:
    agent = agents(prelude=prelude)
    assert any(typical_delay(agent) < 0.015 for _ in range(6))  # once: the machine may be busy otherwise


def test_output_and_end_are_told_and_not_found_by_looking_again(agents: Callable[..., AgentClient]) -> None:
    agent = agents(prelude=SELDOM)
    spec = new_spec("sleep 0.5; echo first; sleep 0.5; echo last; sleep 0.5; exit 7")
    agent.launch(spec)
    state, log = agent.follow(spec["run"])
    assert (state["code"], log) == (7, b"first\nlast\n")


@pytest.mark.parametrize("prelude", [BLIND, NO_MORE], ids=["no watch", "no watch of a log"])
def test_who_is_not_told_looks(agents: Callable[..., AgentClient], prelude: str) -> None:
    agent = agents(prelude=prelude + SELDOM)
    spec = new_spec("sleep 0.5; echo first; sleep 0.5; echo last; sleep 0.5; exit 7")
    agent.launch(spec)
    state, log = agent.follow(spec["run"])
    assert (state["code"], log) == (7, b"first\nlast\n")


@linux
def test_where_nothing_can_be_watched_none_is_given(tmp_path: Path) -> None:
    watches = Watches()
    assert watches.watch(str(tmp_path / "missing")) is None
    watch = watches.watch(str(tmp_path))
    assert watch is not None
    assert not watch.add(str(tmp_path / "missing"))
    watches.close()


@linux
def test_only_whose_files_have_grown_are_told(tmp_path: Path) -> None:
    files = [tmp_path / name / "log" for name in "abc"]
    for file in files:
        file.parent.mkdir()
        file.touch()
    watches = Watches()
    first, second, third = (watches.watch(str(file.parent)) for file in files)
    assert first is not None
    assert second is not None
    assert third is not None
    assert all((first.add(str(files[0])), second.add(str(files[1])), third.add(str(files[1]))))
    assert watches.told() == set()
    with files[1].open("w") as one, files[2].open("w") as unwatched:
        for _ in range(5000):
            print("line", file=one, flush=True)
            print("line", file=unwatched, flush=True)
    assert watches.told() == {second, third}
    second.close()
    files[1].write_text("more")
    (files[0].parent / "state.json").touch()
    assert watches.told() == {first, third}
    shutil.rmtree(files[1].parent)
    watches.told()
    third.close()
    assert watches.told() == set()
    for number in range(20_000):  # more than the kernel keeps
        (files[0].parent / f"{number}").touch()
    assert watches.told() == {first}
    watches.close()


@linux
def test_all_follows_of_an_agent_share_one_descriptor(agent: AgentClient) -> None:
    spec = new_spec("echo begun; sleep 1000")
    agent.launch(spec)
    streams = [agent.frames(agent.send("follow", run=spec["run"], offset=0, tail=None)) for _ in range(8)]
    for frames in streams:
        while next(frames)[1] != b"begun\n":
            pass
    folder = Path(f"/proc/{agent.process.pid}/fd")
    assert [str(entry.readlink()) for entry in folder.iterdir()].count("anon_inode:inotify") == 1


@linux
def test_output_does_not_put_off_the_look_at_the_supervisor(agent: AgentClient) -> None:
    spec = new_spec("sleep 0.4; echo begun; sleep 1000")
    agent.launch(spec)
    run = Run(str(agent.run_folder(spec["run"]).parents[1]), spec["run"])
    watches = Watches()
    frames = follow(run, 0, None, None, watches.watch(run.folder))
    while not isinstance(next(frames), float):
        pass
    looked = time.monotonic()
    agent.wait_for(run.id, b"begun\n")
    *output, pause = next(frames), next(frames)
    assert output == [({"off": 0}, b"begun\n")]
    assert isinstance(pause, float)
    assert time.monotonic() + pause - looked < 1.1
    frames.close()
    watches.close()


def test_streams_leave_no_descriptor_behind(agents: Callable[..., AgentClient]) -> None:
    agent = agents(prelude="import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32)); ")
    long, short = new_spec("sleep 1000", job="long"), new_spec("true", job="short")
    agent.launch(long)
    agent.launch(short)
    for _ in range(32):
        follow = agent.send("follow", run=long["run"], offset=0, tail=None)
        agent.follow(short["run"])
        agent.stop(follow)
        assert [header["id"] for header, _ in agent.frames(follow)][-1] == follow


def test_a_stream_ends_early_when_it_is_told_to(agent: AgentClient) -> None:
    spec = new_spec("echo begun; sleep 1000")
    agent.launch(spec)
    follow = agent.send("follow", run=spec["run"], offset=0, tail=None)
    frames = agent.frames(follow)
    while next(frames)[1] != b"begun\n":
        pass
    agent.stop(follow)
    assert [header for header, _ in frames] == [{"id": follow, "ok": True, "stopped": True}]


def test_no_more_than_a_window_is_sent_to_who_does_not_take_it(agent: AgentClient, tmp_path: Path) -> None:
    (tmp_path / "content").write_bytes(bytes(6 * 2**20))
    spec = new_spec(f"cat {tmp_path}/content")
    agent.launch(spec)
    agent.follow(spec["run"])
    follow = agent.send("follow", run=spec["run"], offset=0, tail=None)
    agent.ask("ping")  # others are served meanwhile
    give_up = time.monotonic() + 10
    while agent.received(follow) < 4 * 2**20:
        agent.ask("ping")
        assert time.monotonic() < give_up
    for _ in range(3):
        agent.ask("ping")
    assert agent.received(follow) == 4 * 2**20
    assert sum(len(payload) for _, payload in agent.frames(follow)) == 6 * 2**20
