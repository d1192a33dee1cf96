"""The shipped probe over real sshd: a simulated Mac and a simulated CUDA host answer to the agent as they must."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulayer.fleet.session import Session
from gpulayer.fleet.transport import ConnectOptions
from gpulayer.gpu.facts import HostFacts, facts_from_report
from gpulayer.spec.inventory import Inventory
from tests.machines import H200_IDS, MAC_MEMORY, SimulatedMachine, simulated_cuda_host, simulated_mac
from tests.sshd import SshdHost


async def asked(known: SshdHost, machine: SimulatedMachine, options: ConnectOptions) -> HostFacts:
    host = known.host
    async with await Session.open(host, Inventory(hosts={host.name: host}), options) as session:
        python = str(machine.python)
        reply = await session.request("probe", python=python, frameworks=["torch"], fresh=False)
    return facts_from_report(json.loads(reply.payload))


@pytest.mark.parametrize("build", [simulated_mac, simulated_cuda_host])
async def test_a_simulated_machine_answers_to_the_agent(
    sshd_host: Callable[..., SshdHost],
    connect_options: ConnectOptions,
    tmp_path: Path,
    build: Callable[[Path], SimulatedMachine],
) -> None:
    machine = build(tmp_path)
    name = build.__name__.replace("_", "-")
    facts = await asked(sshd_host(name, python=str(machine.python)), machine, connect_options)
    first = facts.devices[0]
    found = (facts.os, first.id, first.accelerator, first.memory_kind)
    if build is simulated_mac:
        assert found == ("darwin", "apple:0", "mps", "unified")
        assert first.memory_bytes == facts.memory_bytes == MAC_MEMORY
        assert {"torch", "torch.mps"} <= facts.capabilities
    else:
        assert found == ("linux", H200_IDS[0], "cuda", "dedicated")
        assert [device.id for device in facts.devices] == [*H200_IDS, "cpu:0"]
        assert {"torch", "torch.cuda"} <= facts.capabilities
    assert facts.python == str(machine.python)
