from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gpulayer.remote.wire import encode
from tests.host.agent_client import NONCE, AgentClient, AgentError


def test_hello_says_who_and_where_the_agent_is(tmp_path: Path) -> None:
    with AgentClient(tmp_path) as agent, AgentClient(tmp_path) as second:
        hello = agent.hello()
        assert hello["pid"] == agent.process.pid
        assert Path(hello["state_root"]).parent == tmp_path / "state"
        assert hello["lease_dir"] == str(tmp_path / "leases")
        assert (tmp_path / "state").stat().st_mode & 0o7777 == 0o700
        assert (tmp_path / "leases").stat().st_mode & 0o7777 == 0o1777
        assert second.hello()["host_id"] == hello["host_id"]
    assert agent.process.returncode == 0


def test_nothing_is_served_before_hello(tmp_path: Path) -> None:
    with AgentClient(tmp_path) as agent:
        with pytest.raises(AgentError, match="must be 'hello'"):
            agent.ask("probe")
        agent.hello()
        with pytest.raises(AgentError, match="'frameworks' must be") as caught:
            agent.ask("probe")
        assert caught.value.code == "request"
        assert agent.ask("ping")[0]["now"] > 0


@pytest.mark.parametrize("mode", [0o755, 0o701])
def test_a_state_folder_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state").chmod(mode)
    with AgentClient(tmp_path) as agent:
        with pytest.raises(AgentError, match="others may read or write") as caught:
            agent.hello()
        assert caught.value.code == "no_state_dir"
        assert "state_dir in the inventory" in caught.value.error["fix"]


def test_a_state_folder_behind_a_link_or_below_an_open_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("elsewhere")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with AgentClient(tmp_path) as agent:
        with pytest.raises(AgentError, match="symbolic link"):
            agent.hello(state_dir=str(tmp_path / "link"))
        with pytest.raises(AgentError, match="everybody may write"):
            agent.hello(state_dir=str(tmp_path / "open" / "state"))


def test_a_lease_folder_that_cannot_be_shared_is_refused(tmp_path: Path) -> None:
    (tmp_path / "leases").mkdir(mode=0o755)
    with AgentClient(tmp_path) as agent, pytest.raises(AgentError, match="not 1777") as caught:
        agent.hello()
    assert caught.value.code == "no_lease_dir"


def test_the_agent_ends_when_its_input_ends_or_is_nonsense(tmp_path: Path) -> None:
    agent = AgentClient(tmp_path)
    agent.hello()
    agent.close()
    assert agent.process.returncode == 0
    agent = AgentClient(tmp_path)
    agent.hello()
    agent.write(b"@@GL1 " + os.urandom(16).hex().encode() + b" 2 0 0123456789abcdef\n{}")
    assert agent.process.wait(10) == 0
    agent.close()


def test_another_protocol_is_refused(tmp_path: Path) -> None:
    with AgentClient(tmp_path) as agent, pytest.raises(AgentError, match="speaks protocol 1") as caught:
        agent.hello(protocol=2)
    assert caught.value.code == "protocol"


def test_an_agent_is_introduced_once(tmp_path: Path) -> None:
    with AgentClient(tmp_path) as agent:
        agent.hello()
        with pytest.raises(AgentError, match="introduced before") as caught:
            agent.hello()
        assert caught.value.code == "request"


def test_the_agent_outlives_a_reader_that_is_slow(tmp_path: Path) -> None:
    with AgentClient(tmp_path) as agent:
        agent.hello()
        frame = encode(NONCE, {"id": 99, "op": "ping"})
        agent.write(frame * 2000)  # the answers fill the pipe
        assert agent.ask("ping")[0]["ok"] is True


def test_a_probe_leaves_the_connection_alive(tmp_path: Path) -> None:
    with AgentClient(tmp_path) as agent:
        agent.hello()
        probe = agent.send("probe", python=None, frameworks=[], fresh=False)
        assert agent.ask("ping")[0]["ok"] is True
        header, payload = agent.answer(probe)
        assert header["ok"] is True
        report = json.loads(payload)
        assert report["host"]["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
